"""Writing a GGUF v3 file tensor by tensor, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The header comes first in the file but holds every tensor's type and place. Its size depends only on names, shapes
and metadata, so it is left blank, the data is streamed behind it, and the header is filled in at the end.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qbench.models.gguf_file import ARRAY, BOOL, DEFAULT_ALIGNMENT, FLOAT32, STRING

UINT32, INT32 = 4, 5
Metadata = dict[str, Any]  # str, bool, int (uint32), float (float32), list[str], or an int32 or float32 numpy array


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """Type and bytes of one metadata value."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    kind = {np.dtype("int32"): INT32, np.dtype("float32"): FLOAT32}[value.dtype]
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + bytes(value.data)


class GGUFWriter:
    """Streams tensors into `path`: every name of `shapes` (row-major) once, by `add`, in any order."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], metadata: Metadata) -> None:
        self.metadata = metadata
        self._shapes = shapes
        self._places: dict[str, tuple[str, int]] = {}  # name -> type, offset in the data
        self._file = path.open("wb")
        self._file.write(bytes(len(self._header(dict.fromkeys(shapes, ("F32", 0))))))
        self._start = self._file.tell()

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, name: str, ggml_type: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Appends one tensor's bytes."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]]
        assert name not in self._places and data.nbytes == prod(self._shapes[name]) // block * block_bytes
        self._places[name] = (ggml_type, self._file.tell() - self._start)
        self._file.write(data.data)
        self._file.write(bytes(-data.nbytes % DEFAULT_ALIGNMENT))

    def finish(self) -> None:
        """Fills the header in. `metadata` values of fixed size may have changed since the start."""
        header = self._header(self._places)
        assert len(header) == self._start
        self._file.seek(0)
        self._file.write(header)

    def _header(self, places: dict[str, tuple[str, int]]) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self._shapes), len(self.metadata))]
        parts += [_string(key) + _value(value) for key, value in self.metadata.items()]
        for name, (ggml_type, offset) in places.items():
            shape = self._shapes[name][::-1]
            kind = GGMLQuantizationType[ggml_type]
            parts.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        header = b"".join(parts)
        return header + bytes(-len(header) % DEFAULT_ALIGNMENT)
