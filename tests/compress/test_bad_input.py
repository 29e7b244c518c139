"""NaN and infinite weights and activations are refused, and the message names the layer; on every family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from qbench.compress.engine import compress
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, TensorInfo, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ
from qbench.solvers.hqq import HQQ
from qbench.solvers.nearest import Nearest
from qbench.solvers.signround import SignRound
from qbench.transforms.awq import AWQ
from qbench.transforms.hadamard import Rotated
from qbench.transforms.smoothquant import SmoothQuant
from tests.compress.test_engine import token_rows
from tests.families import FAMILIES, make_family, random_model

INT4 = Integer(bits=4, group_size=32)
FLOAT_ZERO = Integer(bits=4, group_size=32, symmetric=False, zero_point_dtype="float16")
WAYS = {
    "nearest": Scheme(INT4, Nearest()),
    "gptq": Scheme(INT4, GPTQ()),
    "hqq": Scheme(FLOAT_ZERO, HQQ()),
    "signround": Scheme(INT4, SignRound(iters=2)),
    "awq": Scheme(INT4, Nearest(), AWQ(grid=3)),
    "smoothquant": Scheme(INT4, GPTQ(), SmoothQuant()),
    "rotated": Scheme(INT4, Nearest()),
}
LINEAR = {"phi3": "self_attn.qkv_proj", "mixtral": "block_sparse_moe.experts.2.w3"}


class Damaged(ModelSource):
    """`source` with one number of one tensor replaced."""

    def __init__(self, source: ModelSource, name: str, value: float) -> None:
        self.source, self.name, self.value = source, name, value
        self.location, self.config = source.location, source.config

    @property
    def revision(self) -> str:
        return "damaged"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.source.tensors

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        tensor = self.source.load(name)
        assert isinstance(tensor, torch.Tensor)
        if name == self.name:
            tensor = tensor.clone()
            tensor.view(-1)[5] = self.value
        return tensor

    def write_side_files(self, folder: Path) -> list[str]:
        return []


def refusal(source: ModelSource, folder: Path, scheme: Scheme, *, rotate: bool) -> str:
    start = Rotated(source, 0) if rotate else source
    schemes = dict.fromkeys(linear_names(source.tensors, source.config), scheme)
    with pytest.raises(QbenchError) as caught:
        compress(start, schemes, token_rows(6, 24), folder / "model", key="k")
    assert not (folder / "model").exists()
    return str(caught.value)


@pytest.mark.trap(9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_that_is_not_finite_names_its_layer(tmp_path: Path, family: str, way: str) -> None:
    source = open_model(make_family(tmp_path, family))
    layer = f"model.layers.1.{LINEAR.get(family, 'mlp.up_proj')}"
    value = float("inf") if way in ("gptq", "smoothquant") else float("nan")
    message = refusal(Damaged(source, f"{layer}.weight", value), tmp_path, WAYS[way], rotate=way == "rotated")
    assert message.startswith(f"{layer}: ")
    assert "NaN or infinite" in message


@pytest.mark.parametrize("way", ["nearest", "gptq", "awq", "signround"])
def test_a_weight_too_large_for_the_scales_names_its_layer(tmp_path: Path, way: str) -> None:
    source = open_model(make_family(tmp_path, "llama"))
    layer = "model.layers.1.mlp.up_proj"
    message = refusal(Damaged(source, f"{layer}.weight", 1e9), tmp_path, WAYS[way], rotate=False)
    assert message.startswith(f"{layer}: ")
    assert "does not fit float16" in message


@pytest.mark.trap(9)
@pytest.mark.parametrize("way", ["nearest", "gptq", "awq", "smoothquant", "signround"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_that_are_not_finite_name_the_first_layer_that_sees_them(
    tmp_path: Path, family: str, way: str
) -> None:
    """The norm before the second block's attention puts out an infinity.

    Learned rounding first asks what the whole block puts out, and names the block.
    """
    source = open_model(make_family(tmp_path, family))
    norm = "model.layers.1.input_layernorm.weight"
    message = refusal(Damaged(source, norm, float("inf")), tmp_path, WAYS[way], rotate=False)
    seen = r"\.self_attn\.(q|k|v|qkv)_proj: its inputs are" if way != "signround" else ": its output is"
    assert re.match(rf"model\.layers\.1{seen} NaN or infinite", message), message


def test_a_block_whose_output_is_not_finite_is_named(tmp_path: Path) -> None:
    """An uncompressed down projection: no linear that is looked at sees the infinity."""
    source: Any = open_model(make_family(tmp_path, "llama"))
    name = "model.layers.0.mlp.down_proj"
    schemes = {"model.layers.0.self_attn.q_proj": Scheme(INT4, Nearest())}
    damaged = Damaged(source, f"{name}.weight", float("nan"))
    with pytest.raises(QbenchError, match=r"^model\.layers\.0: its output is NaN or infinite"):
        compress(damaged, schemes, token_rows(2, 16), tmp_path / "model", key="k")


@pytest.mark.parametrize("way", ["nearest", "gptq", "signround"])
def test_a_layer_of_weights_below_what_scales_can_hold_is_refused(tmp_path: Path, way: str) -> None:
    layer = "model.layers.1.mlp.up_proj"
    model = random_model("llama")
    model.get_submodule(layer).weight.data.mul_(1e-12)
    model.save_pretrained(tmp_path)
    message = refusal(open_model(tmp_path), tmp_path, WAYS[way], rotate=False)
    assert message.startswith(f"{layer}: all its weights would become 0: the largest,")
