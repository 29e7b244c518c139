"""Errors that are meant for the person at the keyboard."""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class QbenchError(Exception):
    """A user's mistake or an unusable input: shown as one message, never as a traceback; exit code 2.

    The message says what is wrong, where (layer, key or file), what was found and what is allowed.
    """


def file_message(error: OSError) -> str | None:
    """What to say of a file or folder that could not be read or written; None when the error names none."""
    if error.errno in DISK_FULL:
        return f"{error.filename or 'output'}: the disk is full. Free some space and run the same command again."
    if error.filename is None:
        return None
    other = f" (to {error.filename2})" if error.filename2 is not None else ""
    return f"{error.filename}{other}: {error.strerror}."
