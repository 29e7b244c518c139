"""Hashes of large files, remembered in the cache, so that opening a model twice reads its weights once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qbench.progress import progress_bar
from qbench.resources import cache_dir, written_whole

_CHUNK = 16 * 2**20


def content_hash(files: dict[str, Path]) -> str:
    """Hex SHA-256 over name and content of every file; a file is known by path, size, time and inode."""
    known = {name: _remembered(path) for name, path in files.items()}
    size = sum(files[name].stat().st_size for name, entry in known.items() if not entry.is_file())
    total = hashlib.sha256()
    with progress_bar("Hashing the model (MiB)", size / 2**20) as task:
        for name in sorted(files):
            entry = known[name]
            if not entry.is_file():
                digest = hashlib.sha256()
                with files[name].open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                        task.advance(len(chunk) / 2**20)
                with written_whole(entry) as temporary:
                    temporary.write_text(digest.hexdigest(), encoding="ascii")
            total.update(f"{name} {entry.read_text(encoding='ascii')}\n".encode())
    return total.hexdigest()


def _remembered(path: Path) -> Path:
    """Where the hash of `path`, as it is now, is kept."""
    path = path.resolve()
    stat = path.stat()
    key = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    return cache_dir() / "hashes" / hashlib.sha256(key.encode()).hexdigest()
