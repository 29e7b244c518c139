import pytest
import torch

from qbench.formats.float8 import FP8


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
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
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
