"""Importance matrices: files in llama.cpp's layout as gguf-py reads them, values as in transformers' forward pass."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.calibration.imatrix import Imatrix, SquareSum, load_imatrix
from qbench.compress.engine import compress
from qbench.compress.imatrix import collect_imatrix
from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.models.source import open_model
from qbench.scheme import Scheme
from qbench.solvers.nearest import Nearest

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.2.mlp.down_proj"


def rows(count: int = 3, length: int = 20) -> list[list[int]]:
    return torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def test_squares_are_those_of_transformers_forward(tiny_llama: Path) -> None:
    found = collect_imatrix(open_model(tiny_llama), rows(), dataset="random")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64).eval()
    seen: dict[str, torch.Tensor] = {}
    for name in (Q_PROJ, DOWN):

        def note(_: torch.nn.Module, args: Any, name: str = name) -> None:
            seen[name] = args[0].flatten(0, 1).square().sum(0)

        model.get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        model(torch.tensor(rows()))
    assert len(found.entries) == 21
    for name, expected in seen.items():
        assert found.entries[name].tokens == 60
        torch.testing.assert_close(found.entries[name].total.double(), expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.importance(name).double(), expected / 60, rtol=1e-4, atol=1e-6)


def test_a_file_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    squares = torch.rand(64)
    Imatrix({Q_PROJ: SquareSum(squares, 1024)}, chunk_size=512, datasets=["wiki"]).save(tmp_path / "i.gguf")
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("general.t", "im"))}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["wiki"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 512,
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert list(tensors) == ["blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts"]
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight.in_sum2"], squares.numpy())
    assert tensors["blk.0.attn_q.weight.counts"].tolist() == [1024]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    saved = Imatrix({Q_PROJ: SquareSum(torch.rand(64), 77), DOWN: SquareSum(torch.rand(128), 77)}, 7, ["a", "b"])
    saved.save(tmp_path / "i.gguf")
    found = load_imatrix(tmp_path / "i.gguf")
    assert found.chunk_size == 7 and found.datasets == ["a", "b"]
    for name, entry in saved.entries.items():
        assert torch.equal(found.entries[name].total, entry.total) and found.entries[name].tokens == 77


def legacy(entries: dict[str, tuple[int, list[float]]]) -> bytes:
    out = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        out += np.array(values, "<f4").tobytes()
    return out + struct.pack("<ii", 5, 4) + b"wiki"


def test_the_older_format(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy({"blk.0.attn_q.weight": (5, [5.0, 10.0]), "blk.2.ffn_down.weight": (5, [1.0])}))
    found = load_imatrix(path)
    assert found.importance(Q_PROJ).tolist() == [1.0, 2.0]
    assert found.importance(DOWN).tolist() == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "4 bytes are asked for at offset 0 of 0"),
        (legacy({})[:4], "no importance data"),
        (legacy({"blk.0.attn_q.weight": (1, [1.0])})[:30], "bytes are asked for"),
        (struct.pack("<ii", 1, -9), "-9 bytes are asked for"),
        (legacy({"blk.0.attn_q.weight": (1, [float("nan")])}), "negative, NaN or infinite"),
        (legacy({"blk.0.what.weight": (1, [1.0])}), "'blk.0.what.weight' is no weight of a supported architecture"),
        (b"GGUF", "too few for a GGUF header"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "imatrix"
    path.write_bytes(content)
    with pytest.raises(QbenchError, match=message):
        load_imatrix(path)


def test_a_module_without_data_is_named() -> None:
    with pytest.raises(QbenchError, match=f"{DOWN}: the importance matrix has no tokens of it"):
        Imatrix({Q_PROJ: SquareSum(torch.rand(4), 1)}).importance(DOWN)


def test_compression_with_importance_is_quantization_with_the_imatrix(tiny_llama: Path, tmp_path: Path) -> None:
    """The first linears see the same inputs in both: nothing before them is quantized."""
    source, format = open_model(tiny_llama), FORMATS.get("q4_0")()
    scheme = Scheme(format, Nearest(importance=True))
    done = compress(source, {Q_PROJ: scheme}, rows(), tmp_path / "model", key="k")
    stored = done.model.load(f"{Q_PROJ}.weight")
    assert isinstance(stored, QuantizedTensor)
    weight = source.load(f"{Q_PROJ}.weight")
    assert isinstance(weight, torch.Tensor)
    expected = format.quantize(weight, collect_imatrix(source, rows()).importance(Q_PROJ))
    same = stored.parts["blocks"] == expected.parts["blocks"]
    assert same.float().mean() > 0.99  # the sums are taken in another order
    assert not torch.equal(stored.parts["blocks"], format.quantize(weight).parts["blocks"])
