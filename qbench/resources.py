"""Where things that are read or kept lie: packaged data files, the user's cache, files written whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path


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
    """Yields a temporary path beside `path`; renamed to `path` when the block succeeds, removed when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
