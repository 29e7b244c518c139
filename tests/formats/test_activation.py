"""Rounded inputs: judged by compressed-tensors and bitsandbytes (see golden/make_activations.py) and by float64."""

from typing import Literal

import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.activation import ACTIVATIONS, ActivationFormat, activation_from_dict
from qbench.formats.activation_float import FP8Inputs, MXFP8Inputs, NVFP4Inputs
from qbench.formats.activation_int8 import Int8Inputs, LLMInt8
from qbench.formats.base import Format, QuantizedTensor
from qbench.formats.bitpack import unpack_bits
from qbench.formats.float8 import FP8, float8_codes
from qbench.formats.integer import Integer
from qbench.formats.minifloat import ELEMENTS
from qbench.formats.mx import MXFP8
from qbench.formats.nvfp4 import NVFP4
from qbench.kernels.dispatch import linear, prepare
from tests.formats.golden.weights import random_weight
from tests.formats.judged import golden

ALL = [activation_from_dict({"name": name}) for name in ACTIVATIONS.names()]
STATIC = [Int8Inputs("tensor"), FP8Inputs("tensor"), FP8Inputs("group"), FP8Inputs(element="e5m2")]
WEIGHT = Integer(8, "channel", symmetric=True, full_range=False, scale_dtype="float32")


def scale_for(activation: ActivationFormat, x: torch.Tensor) -> torch.Tensor | None:
    return activation.input_scale(x.abs().max()) if activation.static else None


@pytest.mark.parametrize(
    ("activation", "scheme"),
    [
        (FP8Inputs("token"), "fp8-token"),
        (FP8Inputs("group"), "fp8-group"),
        (MXFP8Inputs(), "mxfp8"),
        (NVFP4Inputs(), "nvfp4"),
    ],
    ids=str,
)
def test_rounded_values_are_compressed_tensors(activation: ActivationFormat, scheme: str) -> None:
    """NVFP4: the two divide by a block's scale in another order, so some exact ties go to the other neighbour."""
    judge = golden("activations")
    x = judge["x"]
    ours, theirs = activation.round(x, scale_for(activation, x)), judge[scheme]
    same = torch.isclose(ours, theirs, rtol=2e-7, atol=0)
    assert same.float().mean() > (0.998 if scheme == "nvfp4" else 0.99999)
    torch.testing.assert_close((ours - x).abs()[~same], (theirs - x).abs()[~same], rtol=1e-5, atol=0)


def test_codes_and_columns_are_bitsandbytes() -> None:
    judge = golden("activations")
    codes, scale, columns = LLMInt8().codes(judge["x"])
    assert torch.equal(columns, judge["llm-int8.columns"])
    assert 2 <= len(columns) <= 10
    some = judge["llm-int8.absmax"] > 0  # bitsandbytes divides by the zero of an empty token
    assert torch.equal(codes[some], judge["llm-int8.codes"][some])
    torch.testing.assert_close(scale[some, 0] * 127, judge["llm-int8.absmax"][some], rtol=1e-7, atol=0)
    weight = WEIGHT.quantize(judge["weight"])
    signed = unpack_bits(weight.parts["codes"], 8, 256).to(torch.int16) - 128
    assert torch.equal(signed, judge["llm-int8.weight_codes"].to(torch.int16))


def test_the_product_is_bitsandbytes_and_float64s() -> None:
    """bitsandbytes' plain operator multiplies by 6.200124e-05 where 1 / 127^2 is 6.200012e-05."""
    judge = golden("activations")
    x, quantized = judge["x"], WEIGHT.quantize(judge["weight"])
    prepared = prepare(
        QuantizedTensor(WEIGHT, quantized.shape, quantized.parts, LLMInt8()), torch.float32, torch.device("cpu")
    )
    y = linear(x, prepared)
    some = judge["llm-int8.absmax"] > 0
    torch.testing.assert_close(y[some], judge["llm-int8.product"][some], rtol=1e-4, atol=1e-3)
    exact = LLMInt8().round(x).double() @ quantized.dequantize().double().T
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.trap(23)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_codes_are_summed_as_integers(dtype: torch.dtype) -> None:
    quantized = WEIGHT.quantize(torch.full((4, 128), 0.01))
    weight = QuantizedTensor(WEIGHT, quantized.shape, quantized.parts, LLMInt8())
    y = linear(torch.full((2, 128), 5.0, dtype=dtype), prepare(weight, dtype, torch.device("cpu")))
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.float(), torch.full((2, 4), 6.4), rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=0
    )


@pytest.mark.parametrize("activation", [Int8Inputs(), Int8Inputs("tensor"), LLMInt8(), LLMInt8(0.5)], ids=str)
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("rows", [1, 5])
def test_integer_products_are_exact(activation: ActivationFormat, granularity: str, rows: int) -> None:
    torch.manual_seed(0)
    format = Integer(8, granularity, symmetric=True, full_range=False)
    quantized, x, bias = format.quantize(torch.randn(24, 96)), torch.randn(rows, 96), torch.randn(24)
    parts = dict(quantized.parts)
    if activation.static:
        parts["input_scale"] = activation.input_scale(x.abs().max())
    weight = prepare(QuantizedTensor(format, (24, 96), parts, activation), torch.float32, torch.device("cpu"))
    exact = activation.round(x, parts.get("input_scale")).double() @ quantized.dequantize().double().T + bias
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [256, 80])
@pytest.mark.parametrize(
    ("activation", "format"),
    [
        (FP8Inputs("token"), FP8("channel")),
        (FP8Inputs("token", "e5m2"), FP8("channel", "e5m2")),
        (FP8Inputs("group"), FP8("group")),
        (MXFP8Inputs(), MXFP8()),
        (MXFP8Inputs("e5m2", "ceil"), MXFP8("e5m2", "ceil")),
        (NVFP4Inputs(), NVFP4()),
    ],
    ids=str,
)
def test_a_row_becomes_what_a_row_of_a_weight_does(activation: ActivationFormat, format: Format, width: int) -> None:
    x = random_weight(64, width, 9).float() * torch.logspace(-6, 4, 64).unsqueeze(1)
    scale = scale_for(activation, x)
    shared = None if scale is None else {"scale_2": scale}
    assert torch.equal(activation.round(x, scale), format.quantize(x, shared=shared).dequantize())


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_small_floats_are_those_of_the_cast(kind: Literal["e4m3", "e5m2"]) -> None:
    every = torch.arange(-(2**31), 2**31, 2**11 + 1, dtype=torch.int64).to(torch.int32).view(torch.float32)
    every = every[every.isfinite()]
    assert torch.equal(ELEMENTS[kind].round(every), float8_codes(every, kind).float())


@pytest.mark.parametrize("activation", ALL + STATIC, ids=str)
def test_a_token_is_rounded_alone(activation: ActivationFormat) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, 80)  # no multiple of 32 or 128
    scale = scale_for(activation, x)
    together = activation.round(x, scale)
    assert together.shape == x.shape
    for token, rounded in zip(x, together, strict=True):
        assert torch.equal(activation.round(token[None], scale)[0], rounded)
    assert torch.equal(activation.round(torch.zeros(2, 80), scale), torch.zeros(2, 80))
    assert activation.round(x.bfloat16(), scale).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ALL + STATIC, ids=str)
def test_errors_stay_within_half_a_step(activation: ActivationFormat) -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 128)
    error = (activation.round(x, scale_for(activation, x)) - x).abs() / x.abs().amax(1, keepdim=True)
    assert error.max() < {"int8": 0.008, "llm-int8": 0.004, "nvfp4": 0.2}.get(activation.name, 0.08)


def test_static_inputs_beyond_the_calibrated_range_saturate() -> None:
    x = torch.tensor([[1.0, -3.0, 500.0, 0.0]])
    for activation in (Int8Inputs("tensor"), FP8Inputs("tensor")):
        assert torch.equal(
            activation.round(x, activation.input_scale(torch.tensor(1.0)))[0, 1:3], torch.tensor([-1.0, 1])
        )


@pytest.mark.parametrize("activation", [Int8Inputs("tensor"), FP8Inputs("tensor"), NVFP4Inputs()], ids=str)
@pytest.mark.parametrize("absmax", [0.0, float("nan"), float("inf")])
def test_a_scale_of_nothing_is_refused(activation: ActivationFormat, absmax: float) -> None:
    with pytest.raises(QbenchError, match="all zero, or not finite"):
        activation.input_scale(torch.tensor(absmax))
