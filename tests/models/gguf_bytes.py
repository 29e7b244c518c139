"""GGUF files made by hand, byte by byte, so that every field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qbench.export.gguf_container import GGUFWriter
from qbench.models.gguf_file import read_gguf

UINT16, UINT32, INT32, FLOAT32, STRING, ARRAY, UINT64 = 2, 4, 5, 6, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: Any) -> bytes:
    """A metadata entry: a number, a string, or ready bytes."""
    codes = {UINT16: "<H", UINT32: "<I", INT32: "<i", FLOAT32: "<f", UINT64: "<Q"}
    body = (
        text(value)
        if isinstance(value, str)
        else value
        if isinstance(value, bytes)
        else struct.pack(codes[kind], value)
    )
    return text(key) + struct.pack("<I", kind) + body


def tensor(name: str, dims: Sequence[int], kind: int, offset: int, num_dims: int | None = None) -> bytes:
    """A tensor description; `dims` with the fastest first."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def write(
    path: Path,
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> Path:
    counts = len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def patched(path: Path, folder: Path, **values: Any) -> Path:
    """A copy of a small GGUF file with metadata replaced; None removes, ``__`` stands for a dot."""
    file = read_gguf(path)
    metadata = {key.replace("__", "."): value for key, value in values.items()}
    merged = {key: value for key, value in (file.metadata | metadata).items() if value is not None}
    target = folder / "patched.gguf"
    with GGUFWriter(target, {n: t.shape for n, t in file.tensors.items()}, merged) as writer:
        for name, tensor in file.tensors.items():
            writer.add(name, tensor.type, tensor.read())
        writer.finish()
    return target
