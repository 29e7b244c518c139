"""Models whose linears round their inputs: compressed, stored, run, and judged by transformers' code with hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qbench.compress.activations import Activations
from qbench.compress.engine import compress
from qbench.errors import QbenchError
from qbench.formats.activation import ActivationFormat
from qbench.formats.activation_float import FP8Inputs, MXFP8Inputs, NVFP4Inputs
from qbench.formats.activation_int8 import Int8Inputs, LLMInt8
from qbench.formats.base import Format, QuantizedTensor
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.formats.nvfp4 import NVFP4
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.runtime.llm import LLM
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.compress.test_engine import state_dict, token_rows, transformers_model

INT8 = Integer(8, "channel", symmetric=True, full_range=False, scale_dtype="float32")
CASES: list[tuple[Format, ActivationFormat]] = [
    (INT8, Int8Inputs()),
    (INT8, Int8Inputs("tensor")),
    (INT8, LLMInt8(1.0)),
    (Integer(4, group_size=32), Int8Inputs()),
    (FP8(), FP8Inputs()),
    (FP8("tensor"), FP8Inputs("tensor")),
    (FP8("block"), FP8Inputs("group")),
    (FP8(), MXFP8Inputs()),
    (NVFP4(), NVFP4Inputs()),
]


def compressed(
    folder: Path, out: Path, format: Format, activation: ActivationFormat, solver: Nearest | GPTQ
) -> ModelSource:
    source = open_model(folder)
    scheme = Scheme(format, solver, activation=activation)
    schemes = dict.fromkeys(linear_names(source.tensors, source.config), scheme)
    return open_model(compress(source, schemes, token_rows(), out, key="k").model.folder)


def quantized(model: ModelSource, module: str) -> QuantizedTensor:
    tensor = model.load(f"{module}.weight")
    assert isinstance(tensor, QuantizedTensor)
    return tensor


@pytest.mark.parametrize(("format", "activation"), CASES, ids=str)
def test_the_runtime_computes_what_transformers_does_with_rounded_inputs(
    tiny_llama: Path, tmp_path: Path, format: Format, activation: ActivationFormat
) -> None:
    model = compressed(tiny_llama, tmp_path / "model", format, activation, Nearest())
    judge = transformers_model(tiny_llama, state_dict(model))
    for name, module in judge.named_modules():
        if f"{name}.weight" in model.tensors and isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = quantized(model, name).parts.get("input_scale")
            assert (scale is not None) == activation.static

            def rounded(
                _: torch.nn.Module, args: tuple[torch.Tensor], scale: torch.Tensor | None = scale
            ) -> torch.Tensor:
                return activation.round(args[0].flatten(0, -2), scale).view_as(args[0])

            module.register_forward_pre_hook(rounded)
    llm = LLM(model, dtype="float32", device="cpu", max_model_len=64)
    errors = []
    for ids in token_rows(7, 40, seed=3):
        with torch.inference_mode():
            expected = judge(torch.tensor([ids])).logits[0]
            ours = llm.engine.logits(next(llm.engine.encode([ids])))
        errors.append(float((ours - expected).norm() / expected.norm()))
    assert sorted(errors)[3] < 1e-4, errors  # in some rows one value lies so near a tie that the two round it apart
    assert max(errors) < 0.2, errors
    assert all(activation.name in kernel or "dense" in kernel for kernel in llm.runner.kernels)


def test_static_scales_are_the_largest_inputs_of_the_float_model(tiny_llama: Path, tmp_path: Path) -> None:
    model = compressed(tiny_llama, tmp_path / "model", INT8, Int8Inputs("tensor"), Nearest())
    seen: list[torch.Tensor] = []
    judge = transformers_model(tiny_llama)
    judge.get_submodule("model.layers.0.self_attn.q_proj").register_forward_pre_hook(
        lambda _, args: seen.append(args[0].abs().max())
    )
    with torch.inference_mode():
        judge(torch.tensor(token_rows()))
    for name in ("q_proj", "k_proj", "v_proj"):
        scale = quantized(model, f"model.layers.0.self_attn.{name}").parts["input_scale"]
        torch.testing.assert_close(scale, (seen[0] / 127).view(1, 1), rtol=1e-6, atol=0)


def test_gptq_weights_and_rounded_inputs_go_together(tiny_llama: Path, tmp_path: Path) -> None:
    model = compressed(tiny_llama, tmp_path / "model", NVFP4(), NVFP4Inputs(), GPTQ())
    tensor = quantized(model, "model.layers.2.mlp.down_proj")
    assert tensor.activation == NVFP4Inputs()
    assert tensor.parts["input_scale"] > 0


def test_a_linear_that_no_token_reached_takes_its_siblings_scale() -> None:
    linear = torch.nn.Linear(4, 4)
    names = ("experts.0.up_proj", "experts.1.up_proj", "experts.2.up_proj", "router.gate")
    activations = Activations("model.layers.7", dict.fromkeys(names, Int8Inputs("tensor")))
    activations.start("experts.0.up_proj", linear, torch.tensor(127.0))
    activations.start("experts.1.up_proj", linear, torch.tensor(254.0))
    activations.start("experts.2.up_proj", linear, None)
    weight = INT8.quantize(linear.weight.data)
    assert activations.stored("experts.2.up_proj", weight).parts["input_scale"] == 2
    assert activations.borrowed == {"experts.2.up_proj"}
    with pytest.raises(QbenchError, match=r"model\.layers\.7\.router\.gate: no calibration token reached it"):
        activations.stored("router.gate", weight)


def test_inputs_that_are_all_zero_name_their_layer() -> None:
    activations = Activations("model.layers.1", {"mlp.up_proj": FP8Inputs("tensor")})
    with pytest.raises(
        QbenchError, match=r"model\.layers\.1\.mlp\.up_proj: activation format fp8: a static scale of 0"
    ):
        activations.start("mlp.up_proj", torch.nn.Linear(4, 4), torch.tensor(0.0))
