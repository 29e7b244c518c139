"""Reading a GGUF file's header, with nothing in it believed before it was checked.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, tensor count, metadata count,
metadata, tensor descriptions, padding, tensor data. Every length, count and dimension is held against the bytes
that are left in the file before memory is taken for it. Tensor bytes stay in the file (mapped) until asked for.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qbench.errors import QbenchError

FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", FLOAT32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in a file: `shape` is row-major ``[out, in]`` (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: str  # ggml's name: "F32", "Q4_1", ...
    start: int  # absolute byte offset
    nbytes: int
    data: mmap.mmap

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes, mapped: uint8 ``[nbytes]``."""
        return np.frombuffer(self.data, np.uint8, self.nbytes, self.start)


def typed(path: Path, metadata: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The metadata value of `key`, which must be of `kind` (a float may be written as an int); `default` if absent.

    Raises `QbenchError` when it is absent without a default, or of another type.
    """
    value = metadata.get(key, default)
    if value is None:
        raise QbenchError(f"{path}: metadata {key!r} is missing")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise QbenchError(f"{path}: metadata {key!r} is {type(value).__name__} {value!r:.80}, not {kind.__name__}")
    return value


@dataclass(frozen=True)
class GGUFFile:
    """One or more parts of a model: metadata of the first, tensors of all."""

    paths: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        return typed(self.paths[0], self.metadata, key, kind, default)


class _Cursor:
    """A position in the mapped file that never runs past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, what: str) -> QbenchError:
        return QbenchError(f"{self.path}: {what}")

    def need(self, count: int, field: str) -> int:
        """Moves `count` bytes on and returns where they start."""
        left = len(self.data) - self.at
        if count > left:
            raise self.fail(f"{field} needs {count} bytes at offset {self.at}, the file has {left} left")
        self.at += count
        return self.at - count

    def scalar(self, code: str, field: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.need(layout.size, field))[0]

    def count(self, least_size: int, field: str) -> int:
        """A uint64 number of items, each of at least `least_size` bytes, that must still fit in the file."""
        found: int = self.scalar("Q", field)
        left = len(self.data) - self.at
        if found * least_size > left:
            raise self.fail(f"{field} is {found}, but only {left} bytes are left in the file")
        return found

    def string(self, field: str) -> str:
        length = self.count(1, f"length of {field}")
        start = self.need(length, field)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{field} is not UTF-8 text: {error}") from None


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    """A metadata value: number, bool, str, list of str, or a numpy array of numbers."""
    if kind in SCALARS:
        value = cursor.scalar(SCALARS[kind], key)
        return float(str(np.float32(value))) if kind == FLOAT32 else value  # 1e-05, not 9.999999747378752e-06
    if kind == STRING:
        return cursor.string(key)
    if kind != ARRAY:
        raise cursor.fail(f"metadata {key!r} has unknown value type {kind}")
    element = cursor.scalar("I", f"element type of {key}")
    if element == STRING:
        return [cursor.string(key) for _ in range(cursor.count(8, f"length of array {key}"))]
    if element not in SCALARS:
        raise cursor.fail(f"metadata array {key!r} has element type {element}; strings and numbers are allowed")
    dtype = np.dtype("?" if element == BOOL else "<" + SCALARS[element])
    length = cursor.count(dtype.itemsize, f"length of array {key}")
    return np.frombuffer(cursor.data, dtype, length, cursor.need(length * dtype.itemsize, key))


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    """One tensor description: name, shape, type, offset in the data section, bytes."""
    name = cursor.string("tensor name")
    dimensions = cursor.scalar("I", f"dimensions of {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.scalar("Q", f"shape of {name}") for _ in range(dimensions))[::-1]
    kind = cursor.scalar("I", f"type of {name}")
    offset: int = cursor.scalar("Q", f"offset of {name}")
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise cursor.fail(f"tensor {name!r} has unknown ggml type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if 0 in shape or shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} of type {ggml_type.name} has shape {shape}; rows come in blocks of {block}")
    return name, shape, ggml_type.name, offset, prod(shape) // block * block_bytes


def _read_part(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """Metadata and tensors of one file."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise QbenchError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise QbenchError(f"{path}: cannot be opened: {error.strerror}") from None
    cursor = _Cursor(path, data)
    magic = data[cursor.need(4, "magic") : 4]
    if magic != b"GGUF":
        raise cursor.fail(f"starts with {magic!r}, not with b'GGUF'")
    version = cursor.scalar("I", "version")
    if version not in (2, 3):
        byte_order = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise cursor.fail(f"GGUF version {version}{byte_order}; little-endian versions 2 and 3 can be read")
    tensor_count = cursor.count(8 + 4 + 8 + 4 + 8, "tensor count")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(8 + 4 + 1, "metadata count")):
        key = cursor.string("metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = _value(cursor, cursor.scalar("I", f"type of {key}"), key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise cursor.fail(f"general.alignment is {alignment!r}; a positive multiple of 8 is allowed")

    described = [_tensor(cursor) for _ in range(tensor_count)]
    base = -(-cursor.at // alignment) * alignment
    tensors = []
    for name, shape, ggml_type, offset, nbytes in described:
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} starts at {offset}, which is no multiple of the alignment {alignment}")
        if base + offset + nbytes > len(data):
            raise cursor.fail(
                f"tensor {name!r} ({ggml_type}, shape {shape}) ends at byte {base + offset + nbytes}, "
                f"the file has {len(data)}: truncated or damaged"
            )
        tensors.append(GGUFTensor(name, shape, ggml_type, base + offset, nbytes, data))
    return metadata, tensors


def _part_paths(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """All parts of a split model, in order, given its first one."""
    count = typed(path, metadata, "split.count", int, 1)
    if count <= 1:
        return [path]
    number = typed(path, metadata, "split.no", int)
    if number != 0:
        raise QbenchError(f"{path}: is part {number + 1} of {count}; open the first part")
    name = _SPLIT_NAME.match(path.name)
    if name is None or int(name["count"]) != count:
        raise QbenchError(f"{path}: has {count} parts, so its name must end in -00001-of-{count:05d}.gguf")
    paths = []
    for part in range(count):
        paths.append(path.with_name(f"{name['stem']}-{part + 1:05d}-of-{count:05d}.gguf"))
        if not paths[-1].is_file():
            raise QbenchError(f"{path}: part {paths[-1].name} of {count} is missing")
    return paths


def read_gguf(path: Path) -> GGUFFile:
    """Metadata and tensor places of a GGUF model; all parts when it is split (`path` is the first).

    Raises `QbenchError` naming the file and the field that is wrong.
    """
    metadata, tensors = _read_part(path)
    paths = _part_paths(path, metadata)
    for number, part in enumerate(paths[1:], start=1):
        part_metadata, part_tensors = _read_part(part)
        if part_metadata.get("split.no") != number:
            raise QbenchError(f"{part}: split.no is {part_metadata.get('split.no')}, its name says {number}")
        tensors += part_tensors
    by_name: dict[str, GGUFTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise QbenchError(f"{path}: tensor {tensor.name!r} appears twice")
        by_name[tensor.name] = tensor
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise QbenchError(f"{path}: split.tensors.count is {total}, the {len(paths)} parts hold {len(tensors)} tensors")
    return GGUFFile(paths, metadata, by_name)
