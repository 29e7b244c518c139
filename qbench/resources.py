"""Where things that are read or kept lie: packaged data files, the user's cache, files written whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from qbench.errors import QbenchError

REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)  # nothing (more) can be written
LOCK = ".lock"  # in the folder of a run


def cache_dir() -> Path:
    """The user's qbench cache (models, data); `QBENCH_CACHE` moves it."""
    return Path(os.environ.get("QBENCH_CACHE") or user_cache_path("qbench"))


def data_dir(name: str) -> Path:
    """A folder of files that ship with qbench (`recipes`, `calib_data`, ...): in a checkout the top-level one,
    in a wheel the copy inside the package."""
    root = Path(__file__).parent
    installed = root / "_data" / name
    return installed if installed.is_dir() else root.parent / name


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renamed to `path` when the block succeeds, removed when it fails.

    An OSError that says that nothing more can be written names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in REFUSED and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def is_leftover(path: Path) -> bool:
    """Whether `path` is what `written_whole` leaves when its process is killed."""
    return path.name.startswith(".") and path.name.endswith(".part")


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Makes `folder` and keeps other processes that ask for it out while the block runs.

    What a killed process left half written in it is removed. Raises `QbenchError` when another process has it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            for path in sorted(filter(is_leftover, folder.rglob("*")), reverse=True):  # a folder after what is in it
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield
    except Timeout as error:
        raise QbenchError(
            f"{folder}: another run is writing here. Wait for it to end, or choose another --out."
        ) from error


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
