"""Data in a file of the user's own: ``.txt`` (one document), ``.jsonl`` and ``.parquet`` (a document a row)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qbench.calibration.documents import CHAT, Document, as_document, column_of
from qbench.errors import QbenchError

SUFFIXES = (".txt", ".jsonl", ".parquet")
EXTRA = "pip install 'qbench-workbench[data]'"
FIRST_BYTES = 2**20  # of a text, looked at before a run


def check_file(path: Path, column: str | None) -> bool:
    """Whether the first row is a conversation. Only the file's beginning (parquet: its footer) is read.

    Raises `QbenchError` when the file is missing, empty, or not what its name says.
    """
    if not path.is_file():
        raise QbenchError(f"Data file {path} does not exist.")
    if path.stat().st_size == 0:
        raise QbenchError(f"Data file {path} is empty.")
    if path.suffix == ".parquet":
        return column_of(_parquet(path).schema_arrow.names, column, f"Data file {path}") == CHAT
    if path.suffix == ".jsonl":
        return isinstance(next(_json_lines(path, column), ""), list)
    if column is not None:
        raise QbenchError(f"Data file {path}: a text has no columns; found column {column!r}: leave it out.")
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    if (nul := start.find(b"\0")) >= 0:
        raise QbenchError(f"Data file {path}: not text (byte {nul} is NUL).")
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # a character may be cut where the beginning ends
            raise _not_utf8(path, error.start) from None
    return False


def read_file(path: Path, column: str | None) -> list[Document]:
    """All documents, in order. Raises `QbenchError` naming the file and the row."""
    check_file(path, column)
    if path.suffix == ".parquet":
        return _parquet_rows(path, column)
    return list(_json_lines(path, column)) if path.suffix == ".jsonl" else [_read_text(path)]


def _not_utf8(path: Path, byte: int) -> QbenchError:
    return QbenchError(f"Data file {path}: not UTF-8 text (byte {byte}).")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.start) from None


def _json_lines(path: Path, column: str | None) -> Iterator[Document]:
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"Data file {path}, line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, read + error.start) from None
            read += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise QbenchError(f"{where}: expected a JSON object.")
            key = column_of(list(row), column, where)
            yield as_document(row[key], f"{where}, {key!r}")


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise QbenchError(f"Data file {path}: reading parquet needs pyarrow: {EXTRA}") from None
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise QbenchError(f"Data file {path}: no readable parquet file ({_first_line(error)}).") from error


def _parquet_rows(path: Path, column: str | None) -> list[Document]:
    from pyarrow import ArrowException

    file = _parquet(path)
    key = column_of(file.schema_arrow.names, column, f"Data file {path}")
    try:
        values = file.read(columns=[key]).column(key).to_pylist()
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise QbenchError(f"Data file {path}: damaged ({_first_line(error)}).") from error
    return [as_document(value, f"Data file {path}, row {i}, {key!r}") for i, value in enumerate(values)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
