"""Data for calibration and evaluation by name: a manifest under `calib_data/`, or a file of the user's own.

A file is a text, JSON lines or parquet (`calibration.files`), or a manifest (``.yaml``) like those that ship.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from qbench.calibration.documents import Document, is_blank
from qbench.calibration.files import SUFFIXES, check_file, read_file
from qbench.calibration.hub import check_hub, load_hub
from qbench.calibration.manifest import Hub, Local, Manifest, read_manifest
from qbench.calibration.packaged import load_packaged
from qbench.errors import QbenchError
from qbench.registry import nearest
from qbench.resources import data_dir

SELF_GENERATED = "self-generated"  # text that the model itself writes


@dataclass(frozen=True)
class TextData:
    """Documents and what they came from."""

    name: str
    split: str | None
    documents: list[Document]

    @property
    def sha256(self) -> str:
        """Hash of the documents' text, in order."""
        texts = (item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in self.documents)
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def manifests() -> dict[str, Path]:
    """The data sets that ship with qbench, by name."""
    return {path.stem: path for path in sorted(data_dir("calib_data").glob("*.yaml"))}


def has_splits(name: str) -> bool:
    """Whether data of that name is made of splits."""
    return name != SELF_GENERATED and not name.endswith(SUFFIXES)


def check_data(name: str, split: str | None, column: str | None = None) -> bool:
    """Whether the data holds conversations, as far as its first row tells.

    Raises `QbenchError` when it cannot be loaded. Nothing is fetched; of a file only the beginning is read.
    """
    if not has_splits(name):
        if split is not None:
            raise QbenchError(f"Data file {name} has no splits; found split {split!r}: leave it out.")
        return check_file(Path(name), column)
    if column is not None:
        raise QbenchError(f"Data {name}: its manifest says which column to read; found column {column!r}.")
    manifest = _manifest(name)
    if manifest.mix is not None:
        for part in manifest.mix:
            if not has_splits(part) or _manifest(part).mix is not None:
                raise QbenchError(f"Data {name}: a mix is made of sets with splits; found {part!r}.")
        holds_chat = [check_data(part, split) for part in manifest.mix]
        return any(holds_chat)
    if split not in manifest.splits:
        found = f"data {name!r} has no split {split!r}" if split else f"data {name!r} needs a split"
        raise QbenchError(f"{found}. Allowed: {', '.join(manifest.splits)}.")
    if isinstance(manifest.source, Hub):
        check_hub(name, manifest.source, manifest.splits[split])
        return False
    if isinstance(manifest.source, Local):
        return check_file(Path(manifest.source.path), manifest.source.column)
    assert manifest.source is not None
    return manifest.source.extract.text is None


def load_data(name: str, split: str | None = None, column: str | None = None) -> TextData:
    """The documents of a known set or file. Raises `QbenchError` when there are none or the file is not as expected."""
    check_data(name, split, column)
    documents = _set(name, split) if has_splits(name) else read_file(Path(name), column)
    documents = [document for document in documents if not is_blank(document)]
    if not documents:
        raise QbenchError(f"Data {name}: no text in it. Allowed: at least one document that is not blank.")
    return TextData(name, split, documents)


def _manifest(name: str) -> Manifest:
    path = Path(name)
    if path.suffix == ".yaml":
        if not path.is_file():
            raise QbenchError(f"Data manifest {name} does not exist.")
        return read_manifest(path)
    known = manifests()
    if name not in known:
        raise QbenchError(
            f"Unknown data {name!r}: neither a file ({', '.join((*SUFFIXES, '.yaml'))}) nor {SELF_GENERATED} nor "
            f"a known set. {nearest(name, known)}"
        )
    return read_manifest(known[name])


def _set(name: str, split: str | None) -> list[Document]:
    manifest = _manifest(name)
    if manifest.mix is not None:
        return _in_turns([_set(part, split) for part in manifest.mix])
    assert manifest.source is not None and split is not None
    if isinstance(manifest.source, Hub):
        return load_hub(name, manifest.source, manifest.splits[split])
    if isinstance(manifest.source, Local):
        documents = read_file(Path(manifest.source.path), manifest.source.column)
    else:
        documents = load_packaged(name, manifest.source)
    return documents[("even", "odd").index(manifest.splits[split]) :: 2]


def _in_turns(sets: list[list[Document]]) -> list[Document]:
    """The next document always comes from the set that has given the fewest characters so far, while it lasts."""
    mixed: list[Document] = []
    given, taken = [0] * len(sets), [0] * len(sets)
    while left := [i for i, documents in enumerate(sets) if taken[i] < len(documents)]:
        turn = min(left, key=lambda i: given[i])
        document = sets[turn][taken[turn]]
        mixed.append(document)
        given[turn] += len(document) if isinstance(document, str) else sum(len(m["content"]) for m in document)
        taken[turn] += 1
    return mixed
