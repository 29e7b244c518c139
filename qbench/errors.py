"""Errors that are meant for the person at the keyboard."""


class QbenchError(Exception):
    """A user's mistake or an unusable input: shown as one message, never as a traceback; exit code 2.

    The message says what is wrong, where (layer, key or file), what was found and what is allowed.
    """
