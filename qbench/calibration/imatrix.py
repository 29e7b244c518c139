"""Importance matrices in llama.cpp's file formats: for each linear, the sum of squares of each input over the tokens.

A GGUF imatrix file has two tensors for each weight, ``NAME.in_sum2`` and ``NAME.counts``: one row and one count, or one
of each for every expert of the tensor that holds all of a block's. The older ``.dat`` files hold means times a number
of chunks, which is all that can be had of their counts. Names are GGUF's in files and Hugging Face's modules here.
Importance is over input columns, whose order is the same in both worlds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch

from qbench.calibration.imatrix_names import gguf_place, module_of, usual_module
from qbench.errors import QbenchError
from qbench.models.gguf_file import GGUFFile, read_gguf
from qbench.resources import written_whole

SUMS, COUNTS = ".in_sum2", ".counts"
REVISION = "qbench.model_revision"  # a key of ours in the file: which model was looked at


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
    """`entries` by module, experts by their usual names. `chunk_size` is the tokens a chunk (a calibration row),
    `datasets` where they came from, `revision` the model's own, where the file says it."""

    entries: dict[str, SquareSum]
    chunk_size: int = 512
    datasets: list[str] = field(default_factory=list)
    revision: str | None = None

    def __post_init__(self) -> None:
        self.entries = {usual_module(module): entry for module, entry in self.entries.items()}

    def entry(self, module: str) -> SquareSum | None:
        """What is known of a module, whatever its family calls it; None when nothing is."""
        return self.entries.get(usual_module(module))

    def importance(self, module: str) -> torch.Tensor:
        """The mean square of each input column, ``[in]``. Raises `QbenchError` when `module` has no tokens."""
        entry = self.entry(module)
        if entry is None or entry.tokens == 0:
            raise QbenchError(f"{module}: the importance matrix has no tokens of it.")
        return entry.total / entry.tokens

    def save(self, path: Path) -> None:
        """Writes a GGUF file that llama.cpp's ``--imatrix`` takes; modules in the order of their GGUF names.

        Raises `QbenchError` naming a module that GGUF has no name for.
        """
        with written_whole(path) as part:
            writer = gguf.GGUFWriter(part, "imatrix")
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", self.datasets or ["unknown"])
            chunks = max((entry.tokens for entry in self.entries.values()), default=0) // self.chunk_size
            writer.add_uint32("imatrix.chunk_count", chunks)
            writer.add_uint32("imatrix.chunk_size", self.chunk_size)
            if self.revision is not None:
                writer.add_string(REVISION, self.revision)
            for name, (sums, counts) in sorted(self._tensors().items()):
                writer.add_tensor(name + SUMS, sums)
                writer.add_tensor(name + COUNTS, counts)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()

    def _tensors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Sums and counts by GGUF name: ``[in]`` and ``[1]``, or ``[experts, in]`` and ``[experts, 1]``."""
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        experts: dict[str, dict[int, SquareSum]] = {}
        for module, entry in self.entries.items():
            place = gguf_place(module)
            if place is None:
                raise QbenchError(f"{module}: GGUF has no name for it.")
            name, expert = place
            if expert is None:
                found[name] = (_floats(entry.total), np.array([entry.tokens], np.float32))
            else:
                experts.setdefault(name, {})[expert] = entry
        for name, by_index in experts.items():
            rows = [by_index[i] for i in range(len(by_index))]
            counts = np.array([[row.tokens] for row in rows], np.float32)
            found[name] = (np.stack([_floats(row.total) for row in rows]), counts)
        return found


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


def _floats(total: torch.Tensor) -> np.ndarray:
    return total.cpu().numpy().astype(np.float32)


def _module(name: str, path: Path, expert: int | None = None) -> str:
    try:
        return module_of(name, expert)
    except (KeyError, ValueError):
        raise QbenchError(f"{path}: {name!r} is no weight of a supported architecture.") from None


def _read_gguf(path: Path) -> Imatrix:
    file = read_gguf(path)
    entries: dict[str, SquareSum] = {}
    for name in file.tensors:
        if name.endswith(SUMS):
            entries |= _read_weight(file, name.removesuffix(SUMS), path)
    if not entries:
        raise QbenchError(f"{path}: no importance data; tensors named *{SUMS} are expected.")
    chunk_size = max(file.get("imatrix.chunk_size", int, 512), 1)
    revision = file.get(REVISION, str, "") or None
    return Imatrix(entries, chunk_size, list(map(str, file.get("imatrix.datasets", list, []))), revision)


def _read_weight(file: GGUFFile, weight: str, path: Path) -> dict[str, SquareSum]:
    """One entry, or one for each expert."""
    sums, counts = file.tensors[weight + SUMS], file.tensors.get(weight + COUNTS)
    if counts is None or counts.type != "F32" or sums.type != "F32":
        raise QbenchError(f"{path}: {weight + SUMS!r} and {weight + COUNTS!r} must both be there, as F32.")
    tokens, total = counts.read().view(np.float32).reshape(-1), sums.read().view(np.float32).reshape(-1)
    if len(tokens) == 0 or len(total) % len(tokens) or not all(0 <= count < 2**53 for count in tokens.tolist()):
        raise QbenchError(f"{path}: {weight!r} has {len(total)} sums for the counts {tokens[:8].tolist()}.")
    is_expert = weight.endswith("_exps.weight")
    if len(tokens) > 1 and not is_expert:
        raise QbenchError(f"{path}: {weight!r} has {len(tokens)} counts; only experts' tensors may.")
    rows = torch.from_numpy(total.reshape(len(tokens), -1).copy())
    return {
        _module(weight, path, index if is_expert else None): SquareSum(row, int(count))
        for index, (row, count) in enumerate(zip(rows, tokens, strict=True))
    }


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
