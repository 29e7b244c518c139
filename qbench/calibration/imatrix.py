"""Importance matrices in llama.cpp's file formats: for each linear, the sum of squares of each input over the tokens.

A GGUF imatrix file has two tensors for each weight, ``NAME.in_sum2`` and ``NAME.counts``; the older ``.dat`` files hold
means times a number of chunks, which is all that can be had of their counts. Names are GGUF's in files and Hugging
Face's modules here. Importance is over input columns, whose order is the same in both worlds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch

from qbench.errors import QbenchError
from qbench.models.gguf_file import read_gguf
from qbench.models.gguf_names import to_gguf, to_huggingface
from qbench.resources import written_whole

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass
class SquareSum:
    """The sum of squares of each input column, float32 ``[in]``, and over how many tokens it is."""

    total: torch.Tensor
    tokens: int = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations ``[..., in]`` of real tokens."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        self.total += flat.square().sum(0)
        self.tokens += flat.shape[0]


@dataclass
class Imatrix:
    """`entries` by module. `chunk_size` is the tokens a chunk (a calibration row), `datasets` where they came from."""

    entries: dict[str, SquareSum]
    chunk_size: int = 512
    datasets: list[str] = field(default_factory=list)

    def importance(self, module: str) -> torch.Tensor:
        """The mean square of each input column, ``[in]``. Raises `QbenchError` when `module` has no tokens."""
        entry = self.entries.get(module)
        if entry is None or entry.tokens == 0:
            raise QbenchError(f"{module}: the importance matrix has no tokens of it.")
        return entry.total / entry.tokens

    def save(self, path: Path) -> None:
        """Writes a GGUF file that llama.cpp's ``--imatrix`` takes; modules in the order of their GGUF names."""
        named = {_gguf_name(module): entry for module, entry in self.entries.items()}
        with written_whole(path) as part:
            writer = gguf.GGUFWriter(part, "imatrix")
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", self.datasets or ["unknown"])
            chunks = max((entry.tokens for entry in named.values()), default=0) // self.chunk_size
            writer.add_uint32("imatrix.chunk_count", chunks)
            writer.add_uint32("imatrix.chunk_size", self.chunk_size)
            for name, entry in sorted(named.items()):
                writer.add_tensor(name + SUMS, entry.total.cpu().numpy().astype(np.float32))
                writer.add_tensor(name + COUNTS, np.array([entry.tokens], np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def load_imatrix(path: Path) -> Imatrix:
    """Reads either format. Raises `QbenchError` naming the file and what is wrong with it."""
    if not path.is_file():
        raise QbenchError(f"{path}: there is no such file")
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    found = _read_gguf(path) if is_gguf else _read_legacy(path)
    for module, entry in found.entries.items():
        if not bool(torch.isfinite(entry.total).all()) or bool((entry.total < 0).any()):
            raise QbenchError(f"{path}: {module} holds values that are negative, NaN or infinite.")
    return found


def _gguf_name(module: str) -> str:
    name = to_gguf(f"{module}.weight")
    if name is None:
        raise QbenchError(f"{module}: GGUF has no name for it.")
    return name


def _module(name: str, path: Path) -> str:
    try:
        return to_huggingface(name).removesuffix(".weight")
    except (KeyError, ValueError):
        raise QbenchError(f"{path}: {name!r} is no weight of a supported architecture.") from None


def _read_gguf(path: Path) -> Imatrix:
    file = read_gguf(path)
    entries = {}
    for name, tensor in file.tensors.items():
        if not name.endswith(SUMS):
            continue
        weight = name.removesuffix(SUMS)
        counts = file.tensors.get(weight + COUNTS)
        if counts is None or counts.type != "F32" or tensor.type != "F32":
            raise QbenchError(f"{path}: {name!r} and {weight + COUNTS!r} must both be there, as F32.")
        tokens = counts.read().view(np.float32)
        if len(tokens) != 1:
            raise QbenchError(f"{path}: {weight!r} has {len(tokens)} experts; one matrix a weight can be read.")
        total = torch.from_numpy(tensor.read().view(np.float32).copy())
        entries[_module(weight, path)] = SquareSum(total, int(tokens[0]))
    if not entries:
        raise QbenchError(f"{path}: no importance data; tensors named *{SUMS} are expected.")
    return Imatrix(entries, file.get("imatrix.chunk_size", int, 512), list(file.metadata.get("imatrix.datasets", [])))


def _read_legacy(path: Path) -> Imatrix:
    """Count, then for each entry: name, number of calls, number of values, ``mean * calls``; all little-endian."""
    data, at = path.read_bytes(), 0

    def take(count: int) -> bytes:
        nonlocal at
        if count < 0 or at + count > len(data):
            raise QbenchError(f"{path}: {count} bytes are asked for at offset {at} of {len(data)}.")
        at += count
        return data[at - count : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    entries = {}
    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        calls, values = number(), number()
        total = torch.from_numpy(np.frombuffer(take(4 * values), "<f4").copy())
        entries[_module(name, path)] = SquareSum(total, max(calls, 1))
    if not entries:
        raise QbenchError(f"{path}: no importance data.")
    return Imatrix(entries, chunk_size=1)
