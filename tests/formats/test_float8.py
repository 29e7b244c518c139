import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.float8 import FP8
from tests.formats.judged import golden, same_float8


def e4m3_values() -> torch.Tensor:
    """Every finite E4M3 value from its definition: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinity."""
    values = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 15 and mantissa == 7:
                continue  # NaN
            values.append(mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor([-v for v in values] + values, dtype=torch.float64).unique()


@pytest.mark.trap(26)
def test_cast_saturates() -> None:
    format, one = FP8(), {"scale": torch.ones(1, 1)}
    codes = format.encode(torch.tensor([[448.0, 1000.0, -1000.0, 470.0, 0.0]]), one)
    assert format.decode(codes, one).tolist() == [[448.0, 448.0, -448.0, 448.0, 0.0]]


@pytest.mark.trap(27)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_zeros_decode_to_zeros(granularity: str) -> None:
    weight = torch.randn(4, 32)
    weight[2] = 0
    for case in (weight, torch.zeros(4, 32)):
        quantized = FP8(granularity).quantize(case)
        assert torch.isfinite(quantized.dequantize()).all()
        assert torch.equal(quantized.dequantize()[2], torch.zeros(32))


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_is_the_nearest_e4m3_value(granularity: str) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    quantized = FP8(granularity).quantize(weight)
    absmax = weight.abs().amax(1, keepdim=True) if granularity == "channel" else weight.abs().max()
    assert torch.allclose(quantized.parts["scale"], (absmax / 448).expand_as(quantized.parts["scale"]), rtol=1e-6)
    relative = (weight / quantized.parts["scale"]).double()
    distances = (relative.unsqueeze(-1) - e4m3_values()).abs()
    chosen = (quantized.parts["codes"].double() - relative).abs()
    assert torch.equal(chosen, distances.amin(-1))


def test_eight_bits_and_a_scale_a_row() -> None:
    assert FP8().quantize(torch.randn(4, 128)).bits_per_weight == 8 + 32 / 128


@pytest.mark.parametrize(
    ("granularity", "weight"),
    [("tensor", "random"), ("tensor", "edges"), ("channel", "random"), ("channel", "edges"), ("block", "tall")],
)
def test_every_code_and_scale_is_compressed_tensors(granularity: str, weight: str) -> None:
    """It stores a tiny scale, and we store 1, where all weights are zero; and it drops the sign of a zero."""
    judge = golden("compressed_tensors")
    quantized = FP8(granularity).quantize(judge[weight].float())
    expected = judge[f"fp8-{granularity}-{weight}.scale"].view(quantized.parts["scale"].shape)
    zero = expected == torch.finfo(torch.float32).eps
    assert zero.sum() == {"channel": 2, "block": 1, "tensor": 0}[granularity] * (weight != "random")
    assert torch.equal(quantized.parts["scale"], torch.where(zero, 1.0, expected))
    assert same_float8(quantized.parts["codes"], judge[f"fp8-{granularity}-{weight}.codes"])


def test_tiles_share_a_scale() -> None:
    """Whole and partial tiles of 128 x 128 against the largest magnitude of each, found one by one."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(2))
    quantized = FP8("block").quantize(weight)
    absmax = [[weight[i : i + 128, j : j + 128].abs().max() for j in (0, 128)] for i in (0, 128, 256)]
    assert torch.equal(quantized.parts["scale"], torch.tensor(absmax) / 448)
    assert (quantized.dequantize() - weight).abs().max() <= weight.abs().max() / 448 * 16


def test_e5m2() -> None:
    """Two bits of mantissa: relative error at most 1/8 above the subnormals; the largest weight is exact."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    quantized = FP8(element="e5m2").quantize(weight)
    assert quantized.parts["codes"].dtype == torch.float8_e5m2
    assert torch.equal(quantized.parts["codes"].float().abs().amax(1), torch.full((8,), 57344.0))
    assert ((quantized.dequantize() - weight).abs() / weight.abs()).max() <= 1 / 8
    one = {"scale": torch.ones(1, 1)}
    assert FP8(element="e5m2").encode(torch.tensor([[1e6, -1e6]]), one).float().tolist() == [[57344.0, -57344.0]]


def test_nan_is_refused() -> None:
    with pytest.raises(QbenchError, match="format fp8: a weight is NaN or infinite"):
        FP8().quantize(torch.tensor([[1.0, float("inf")]]))
