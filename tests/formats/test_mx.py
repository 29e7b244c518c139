import pytest
import torch

from qbench.formats.base import Format
from qbench.formats.bitpack import unpack_bits
from qbench.formats.e2m1 import E2M1_LEVELS, e2m1_codes
from qbench.formats.mx import MXFP4, MXFP8, e8m0, power_of_two
from tests.formats.judged import golden, same_float8

RULES = ("even", "floor", "ceil")


@pytest.mark.parametrize("weight", ["random", "edges"])
@pytest.mark.parametrize("format", [MXFP4(), MXFP8()], ids=str)
def test_every_code_and_scale_is_compressed_tensors(format: Format, weight: str) -> None:
    """Edges: ties, absmax around 1.75 * 2^k and the largest element values, zeros, subnormals, 1.6e38."""
    judge = golden("compressed_tensors")
    quantized = format.quantize(judge[weight].float())
    assert torch.equal(quantized.parts["scale"], judge[f"{format.name}-{weight}.scale"])
    codes, expected = quantized.parts["codes"], judge[f"{format.name}-{weight}.codes"]
    assert torch.equal(codes, expected) if format.name == "mxfp4" else same_float8(codes, expected)


@pytest.mark.parametrize("weight", ["random", "edges"])
def test_the_ceiling_rule_is_model_optimizers(weight: str) -> None:
    judge = golden("modelopt")
    quantized = MXFP8(scale_rule="ceil").quantize(judge[weight].float())
    assert torch.equal(quantized.parts["scale"], judge[f"mxfp8-{weight}.scale"])
    assert same_float8(quantized.parts["codes"], judge[f"mxfp8-{weight}.codes"])
    quantized = MXFP4(scale_rule="ceil").quantize(judge[weight].float())
    assert torch.equal(quantized.parts["scale"], judge[f"mxfp4-{weight}.scale"])


@pytest.mark.trap(29)
@pytest.mark.parametrize(("rule", "scale", "value"), [("floor", 1, 6), ("ceil", 2, 8), ("even", 2, 8)])
def test_a_block_whose_largest_weight_is_seven(rule: str, scale: int, value: int) -> None:
    weight = torch.tensor([[7.0, 1.0] + [0.0] * 30])
    quantized = MXFP4(scale_rule=rule).quantize(weight)
    assert power_of_two(quantized.parts["scale"]).item() == scale
    assert quantized.dequantize()[0, 0] == value


@pytest.mark.parametrize(
    ("absmax", "floor", "even", "ceil"),
    [
        (4.0, 0, 0, 0),
        (6.0, 0, 0, 0),
        (6.001, 0, 0, 1),
        (6.999, 0, 0, 1),
        (7.0, 0, 1, 1),
        (8.0, 1, 1, 1),
        (3.5, -1, 0, 0),
    ],
)
def test_exponents_by_rule(absmax: float, floor: int, even: int, ceil: int) -> None:
    weight = torch.full((1, 32), absmax)
    found = [int(MXFP4(scale_rule=rule).quantize(weight).parts["scale"]) - 127 for rule in ("floor", "even", "ceil")]
    assert found == [floor, even, ceil]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("element", "largest"), [("e4m3", 448), ("e5m2", 57344)])
def test_eight_bit_blocks_saturate_as_their_rule_says(rule: str, element: str, largest: int) -> None:
    """Scales against exponents found in float64: the ceiling rule never saturates, the floor rule at most by half."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 100
    quantized = MXFP8(element, rule).quantize(weight)
    absmax = weight.double().view(64, 4, 32).abs().amax(2)
    top = absmax / power_of_two(quantized.parts["scale"]).double()
    below, above = {"floor": (2**8, 2**9), "even": (1.75 * 2**7, 1.75 * 2**8), "ceil": (224 - 1e-9, 448)}[rule]
    ratio = {"e4m3": 1, "e5m2": 2**7}[element]
    assert top.min() >= below * ratio
    assert top.max() <= above * ratio
    error = (quantized.dequantize() - weight).abs() / weight.abs()
    fits = (weight.double().view(64, 4, 32).abs() / power_of_two(quantized.parts["scale"]).unsqueeze(2)) <= largest
    normal = weight.double().view(64, 4, 32).abs() / power_of_two(quantized.parts["scale"]).unsqueeze(2) > 2**-6
    assert error.view(64, 4, 32)[fits & normal].max() <= {"e4m3": 1 / 16, "e5m2": 1 / 8}[element]


@pytest.mark.trap(27)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cls", [MXFP4, MXFP8])
def test_zeros_decode_to_zeros(cls: type[MXFP4] | type[MXFP8], rule: str) -> None:
    weight = torch.randn(4, 96)
    weight[1] = 0
    weight[2, 32:64] = 0
    for case in (weight, torch.zeros(4, 96)):
        quantized = cls(scale_rule=rule).quantize(case)
        assert (quantized.parts["scale"] != 255).all()
        decoded = quantized.dequantize()
        assert torch.isfinite(decoded).all()
        assert torch.equal(decoded[1], torch.zeros(96)) and torch.equal(decoded[2, 32:64], torch.zeros(32))


def test_every_exponent_byte_survives() -> None:
    scale = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0(power_of_two(scale)), scale)
    assert torch.equal(power_of_two(scale).double(), 2.0 ** (scale.double() - 127))


def test_e2m1_is_nearest_with_ties_to_even() -> None:
    values = torch.linspace(-7, 7, 2801)  # every multiple of 0.005, all midpoints among them
    levels = torch.tensor(E2M1_LEVELS[:8], dtype=torch.float64)
    distance = (values.double().abs().unsqueeze(1) - levels).abs()
    nearest = distance.amin(1, keepdim=True)
    codes = e2m1_codes(values)
    assert torch.equal(distance.gather(1, (codes & 7).long().unsqueeze(1)), nearest)
    for tie in (distance <= nearest).sum(1).eq(2).nonzero().flatten():
        assert codes[tie] % 2 == 0
    assert torch.equal(codes >= 8, values < 0)


def test_a_partial_last_block_and_bits() -> None:
    weight = torch.randn(8, 80)
    quantized = MXFP4().quantize(weight)
    assert quantized.parts["scale"].shape == (8, 3)
    assert torch.equal(quantized.dequantize()[:, 64:], MXFP4().quantize(weight[:, 64:]).dequantize())
    assert unpack_bits(quantized.parts["codes"], 4, 80).shape == (8, 80)
    assert MXFP4().quantize(torch.randn(4, 128)).bits_per_weight == 4.25
    assert MXFP8().quantize(torch.randn(4, 128)).bits_per_weight == 8.25
