"""Data sets of the Hugging Face hub, read with the `datasets` library and kept as JSON lines in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from qbench.calibration.documents import Document, as_document, column_of
from qbench.calibration.files import EXTRA
from qbench.calibration.manifest import Hub
from qbench.errors import QbenchError
from qbench.progress import console
from qbench.resources import cache_dir, written_whole


def check_hub(name: str, hub: Hub, split: str) -> None:
    """Raises `QbenchError` when the rows are not in the cache and cannot be asked for."""
    if _cached(hub, split).is_file():
        return
    if importlib.util.find_spec("datasets") is None:
        raise QbenchError(f"Data {name} comes from the Hugging Face hub, which needs `datasets`: {EXTRA}")
    if hub.is_folder and not Path(hub.dataset).is_dir():
        raise QbenchError(f"Data {name}: there is no folder {hub.dataset}.")


def load_hub(name: str, hub: Hub, split: str) -> list[Document]:
    """The first `hub.documents` documents of a split. Only those are fetched; from then on no network is needed.

    Raises `QbenchError` when the hub cannot be reached or the set is not as the manifest says.
    """
    path = _cached(hub, split)
    if path.is_file():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    documents = _fetch(name, hub, split)
    if not hub.is_folder:
        with written_whole(path) as temporary:
            temporary.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return documents


def _cached(hub: Hub, split: str) -> Path:
    key = hashlib.sha256(json.dumps([hub.model_dump(), split], sort_keys=True).encode()).hexdigest()
    return cache_dir() / "data" / f"{key}.jsonl"


def _fetch(name: str, hub: Hub, split: str) -> list[Document]:
    check_hub(name, hub, split)
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from httpx import HTTPError

    if not hub.is_folder:
        console.print(f"Reading {hub.documents} rows of {hub.dataset} ...")
    found: list[Document] = []
    try:
        rows = load_dataset(hub.dataset, hub.config, split=split, revision=hub.revision, streaming=True)
        for index, row in enumerate(rows.take(hub.documents)):
            where = f"Data {name}, row {index} of {split}"
            key = column_of(list(row), hub.column, where)
            found.append(as_document(row[key], f"{where}, {key!r}"))
    except (DatasetsError, HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise QbenchError(
            f"Data {name}: {hub.dataset} ({split}) is not in the cache ({cache_dir()}) and could not be read: {reason}"
        ) from error
    return found
