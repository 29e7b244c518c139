"""Dense weights that carry what happens to a linear's input: kept, read back, and multiplied as they say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from qbench.formats.activation import activation_from_dict
from qbench.formats.base import FORMATS, QuantizedTensor, format_from_dict
from qbench.formats.dense import Dense
from qbench.kernels.dispatch import linear, prepare
from qbench.models.compressed import CompressedModel, CompressedWriter
from qbench.models.source import open_model


@pytest.mark.parametrize("smoothed", [False, True])
def test_inputs_are_smoothed_then_rounded(tiny_llama: Path, tmp_path: Path, smoothed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.up_proj.weight"
    source = open_model(tiny_llama)
    weight = source.load(name)
    assert isinstance(weight, torch.Tensor)
    smoothing = torch.rand(1, weight.shape[1], generator=generator) + 0.5
    parts = {"weight": weight, "input_scale": torch.tensor([[0.03]])} | ({"smoothing": smoothing} if smoothed else {})
    activation = activation_from_dict({"name": "int8", "granularity": "tensor"})
    made = QuantizedTensor(Dense(), (weight.shape[0], weight.shape[1]), parts, activation)
    writer = CompressedWriter(tmp_path, 1)
    writer.write_shard(0, {other: source.load(other) for other in source.tensors} | {name: made})
    writer.finish(source, source.config)
    again = CompressedModel(tmp_path).load(name)
    assert isinstance(again, QuantizedTensor)
    assert torch.equal(again.dequantize(), weight)
    x = torch.randn(5, weight.shape[1], generator=generator)
    ran: Counter[str] = Counter()
    y = linear(x, prepare(again, torch.float32, torch.device("cpu")), ran=ran)
    seen = (x * smoothing if smoothed else x) / 0.03
    expected = seen.round().clamp(-127, 127).double() * 0.03 @ weight.double().T
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert ran == {"dense_f32+int8": 1}


def test_no_recipe_names_it() -> None:
    assert "dense" not in FORMATS
    assert format_from_dict({"name": "dense"}) == Dense()
