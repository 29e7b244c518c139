"""Folders by content."""

from pathlib import Path

from qbench.resources import sha256_file


def folder_digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` by relative name: two runs are equal when these are."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}
