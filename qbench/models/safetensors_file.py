"""Safetensors files: the header is checked against the file before any memory is taken from what it claims.

Layout: a little-endian uint64 header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the data,
which the tensors cover without gaps or overlaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError
from qbench.lazy import lazy_import
from qbench.models.json_file import unique_pairs
from qbench.models.source import TensorInfo

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

MAX_HEADER = 32 * 2**20  # about a quarter of a million tensors
MAX_METADATA = 2**20  # characters
MAX_ENTRY = 4096  # characters of one tensor's entry
MAX_DIMS = 16
DTYPES = {  # safetensors' name: (bytes, torch's name)
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"),
    "I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"),
    "U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
}  # fmt: skip
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    start: int  # byte offset in the file


class SafetensorsFile:
    """One checked file: `tensors` from its header, `load` reads one tensor into memory of its own."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header. Raises `QbenchError` naming the file and the tensor."""
        self.path = path
        self._entries = _read_header(path)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: entry.info for name, entry in self._entries.items()}

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU. KeyError on an unknown name."""
        entry = self._entries[name]
        dtype = getattr(torch, DTYPES[entry.info.dtype][1])
        # Torch's own allocation: its alignment is always the same, and with it the last bits of every product.
        tensor = torch.empty(entry.info.shape, dtype=dtype)
        self._read_into(name, memoryview(tensor.view(-1).view(torch.uint8).numpy().data))
        return tensor

    def read_bytes(self, name: str) -> bytearray:
        """The tensor's stored bytes."""
        data = bytearray(self._entries[name].info.nbytes)
        self._read_into(name, memoryview(data))
        return data

    def _read_into(self, name: str, data: memoryview) -> None:
        with self.path.open("rb") as file:
            file.seek(self._entries[name].start)
            if file.readinto(data) != len(data):
                raise QbenchError(f"{self.path}: tensor {name!r} could not be read whole; the file became shorter.")


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise QbenchError(f"{path}: {size} bytes is too short for a safetensors file.")
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise QbenchError(f"{path}: header claims {length} bytes, the file holds {size - 8} after the length.")
            if length > MAX_HEADER:
                raise QbenchError(f"{path}: a header of {length} bytes is more than the {MAX_HEADER} allowed.")
            header = file.read(length)
    except OSError as error:
        raise QbenchError(f"{path}: cannot be read ({error.strerror}).") from error
    entries: dict[str, _Entry] = {}
    name = "(none yet)"
    try:
        for name, value in _members(header.decode("utf-8")):
            if name in entries:
                raise ValueError("it appears twice")
            entries[name] = _entry(value, data_start=8 + length)
    except (ValueError, RecursionError) as error:
        raise QbenchError(f"{path}: bad safetensors header at or after tensor {name!r}: {error}.") from error
    _check_layout(path, entries, 8 + length, size)
    return entries


def _members(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and entry of each tensor, decoded one at a time within bounds, so that a hostile header costs nothing."""
    at = _after(text, 0, "{")
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError(f"expected a tensor's name at character {at}, found {text[at : at + 10]!r}")
        name, at = _DECODER.raw_decode(text, at)
        at = _after(text, at, ":")
        if name == "__metadata__":
            _, length = _DECODER.raw_decode(text[at : at + MAX_METADATA])
            stop = at + length
        else:
            stop = text.find("}", at, at + MAX_ENTRY) + 1
            if stop == 0:
                raise ValueError(f"the entry of tensor {name!r} does not end within {MAX_ENTRY} characters")
            try:
                value = json.loads(text[at:stop], object_pairs_hook=unique_pairs)
            except ValueError as error:
                raise ValueError(f"the entry of tensor {name!r} is no JSON object: {error}") from error
            yield name, value
        at = _skip_space(text, stop)
        if text[at : at + 1] != "}":
            at = _after(text, at, ",")
    if text[at + 1 :].strip():
        raise ValueError("text after the closing brace")


def _skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _after(text: str, at: int, char: str) -> int:
    """The position after `char` and the spaces around it. ValueError when `char` is not there."""
    at = _skip_space(text, at)
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r} at character {at}, found {text[at : at + 10]!r}")
    return _skip_space(text, at + 1)


def _entry(value: dict[str, Any], data_start: int) -> _Entry:
    """One tensor's entry, checked by itself. ValueError says what is wrong."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape {shape!r} is not a list of at most {MAX_DIMS} sizes")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {offsets!r} are not two positions")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype][0]
    if end - begin != nbytes:
        raise ValueError(f"{dtype} {shape} needs {nbytes} bytes, data_offsets {offsets} hold {end - begin}")
    return _Entry(TensorInfo(tuple(shape), dtype, nbytes), data_start + begin)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, entries: dict[str, _Entry], data_start: int, size: int) -> None:
    """The tensors must cover the data exactly: no gap, no overlap, nothing missing, nothing left over."""
    position, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].info.nbytes)):
        end = entry.start + entry.info.nbytes
        if end > size:
            raise QbenchError(f"{path}: tensor {name!r} ends at byte {end}, the file has {size}: it is truncated.")
        if entry.start < position:
            raise QbenchError(f"{path}: tensor {name!r} overlaps {previous!r} by {position - entry.start} bytes.")
        if entry.start > position:
            raise QbenchError(f"{path}: {entry.start - position} unclaimed bytes between {previous!r} and {name!r}.")
        position, previous = end, name
    if position != size:
        raise QbenchError(f"{path}: {size - position} unclaimed bytes after the last tensor, {previous!r}.")
