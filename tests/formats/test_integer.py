import numpy as np
import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.bitpack import unpack_bits
from qbench.formats.integer import Integer

ABSMAX_INT8 = Integer(bits=8, granularity="channel", full_range=False, scale_dtype="float32")


def codes_of(format: Integer, weight: torch.Tensor) -> torch.Tensor:
    return unpack_bits(format.quantize(weight).parts["codes"], format.bits, weight.shape[1]).int()


@pytest.mark.trap(16)
def test_absmax_int8_codes() -> None:
    weight = torch.tensor([[1.2, -0.5, -4.3, 1.2, -3.1, 0.8, 2.4, 5.4]])
    assert (codes_of(ABSMAX_INT8, weight) - 128).tolist() == [[28, -12, -101, 28, -73, 19, 56, 127]]


@pytest.mark.trap(16)
def test_absmax_int8_never_uses_minus_128() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = -weight.abs().amax(1) * 1.5
    assert (codes_of(ABSMAX_INT8, weight) - 128).min() == -127


def test_a_signed_scale_gives_the_largest_magnitude_the_lowest_code() -> None:
    weight = torch.tensor([[8.0, -7.0, 3.0, 0.0], [-8.0, 7.0, -3.0, 0.0]])
    for granularity in ("channel", "tensor"):
        format = Integer(bits=4, granularity=granularity, signed_scale=True)  # type: ignore[arg-type]
        assert torch.equal(format.quantize(weight).dequantize()[0], weight[0])
    quantized = Integer(bits=4, granularity="channel", signed_scale=True).quantize(weight)
    assert quantized.parts["scale"].tolist() == [[-1.0], [1.0]]
    assert codes_of(quantized.format, weight).tolist() == [[0, 15, 5, 8]] * 2  # type: ignore[arg-type]
    assert not Integer(bits=4, symmetric=False, signed_scale=True).signed_scale
    assert not Integer(bits=4, full_range=False, signed_scale=True).signed_scale


@pytest.mark.trap(17)
def test_asymmetric_range_is_widened_to_hold_zero() -> None:
    weight = torch.arange(-22.0, -14.0).view(1, -1)
    quantized = Integer(bits=8, granularity="channel", symmetric=False, scale_dtype="float32").quantize(weight)
    assert quantized.parts["scale"].item() == pytest.approx(22 / 255, rel=1e-6)
    assert quantized.parts["zero_point"].item() == 255
    assert (quantized.dequantize() - weight).abs().max() <= 22 / 255 / 2 + 1e-6


@pytest.mark.trap(3)
def test_last_partial_group_has_its_own_scale() -> None:
    weight = torch.cat([torch.full((5, 128), 7.5), torch.full((5, 64), 0.75)], 1)
    quantized = Integer(bits=4, group_size=128).quantize(weight)
    assert quantized.parts["scale"].tolist() == [[1.0, pytest.approx(0.1, rel=1e-3)]] * 5
    assert quantized.dequantize().shape == (5, 192)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_agrees_with_float64(bits: int, symmetric: bool, granularity: str) -> None:
    """An independent float64 rounding of the textbook formula; only exact ties may differ."""
    weight = torch.randn(6, 80, generator=torch.Generator().manual_seed(bits)) + 0.3
    format = Integer(bits, granularity, 32 if granularity == "group" else None, symmetric, scale_dtype="float32")
    quantized = format.quantize(weight)
    values = weight.double().numpy()
    pieces = {"tensor": [values], "channel": [values], "group": np.split(values, [32, 64], 1)}[granularity]
    expected = []
    for piece in pieces:
        axis = None if granularity == "tensor" else 1
        if symmetric:
            scale = np.abs(piece).max(axis=axis, keepdims=True) * 2 / (2**bits - 1)
            zero = np.full_like(scale, 2 ** (bits - 1))
        else:
            low = np.minimum(piece.min(axis=axis, keepdims=True), 0)
            scale = (np.maximum(piece.max(axis=axis, keepdims=True), 0) - low) / (2**bits - 1)
            zero = np.round(-low / scale)
        expected.append((np.clip(np.round(piece / scale) + zero, 0, 2**bits - 1) - zero) * scale)
    reference = np.concatenate(expected, 1)
    difference = np.abs(quantized.dequantize().numpy() - reference)
    assert np.quantile(difference, 0.99) < 1e-6
    assert (difference > 1e-5).mean() < 0.01


def test_scale_is_rounded_before_codes_are_chosen() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    half = Integer(bits=8, granularity="channel").quantize(weight)
    assert half.parts["scale"].dtype == torch.float16
    scale = half.parts["scale"].float()
    nearest = (weight / scale).round().clamp(-128, 127) * scale
    assert torch.equal(half.dequantize(), nearest)


def test_zeros_stay_zero() -> None:
    for symmetric in (True, False):
        quantized = Integer(bits=4, group_size=32, symmetric=symmetric).quantize(torch.zeros(2, 64))
        assert torch.equal(quantized.dequantize(), torch.zeros(2, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_a_scale_cannot_hold_is_refused(bad: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 3] = bad
    with pytest.raises(QbenchError, match="scale"):
        Integer(bits=4, group_size=32).quantize(weight)


def test_a_float_zero_point_uses_the_whole_range_and_lies_between_codes() -> None:
    weight = torch.linspace(0.95, 1.25, 32).view(1, -1)
    quantized = Integer(4, "group", 32, symmetric=False, scale_dtype="float32", zero_point_dtype="float32").quantize(
        weight
    )
    assert quantized.parts["scale"].item() == pytest.approx(0.02, rel=1e-5)
    assert quantized.parts["zero_point"].item() == pytest.approx(-47.5, rel=1e-5)
    assert (quantized.dequantize() - weight).abs().max() <= 0.01 + 1e-5


def test_a_narrow_range_far_from_zero_keeps_a_zero_point_that_float16_holds() -> None:
    weight = torch.tensor([[100.0, 100.01], [-3.0, -3.0], [0.0, 0.0], [1e-9, 2e-9]])
    quantized = Integer(4, "group", 2, symmetric=False, zero_point_dtype="float16").quantize(weight)
    assert quantized.parts["zero_point"].dtype == torch.float16
    assert quantized.parts["zero_point"].abs().max() <= 1025
    torch.testing.assert_close(quantized.dequantize(), weight, rtol=1e-3, atol=1e-8)


def test_a_symmetric_format_has_no_zero_point_dtype() -> None:
    assert Integer(4, zero_point_dtype="float16") == Integer(4)


def test_bits_per_weight_counts_scales_and_zero_points() -> None:
    weight = torch.randn(8, 128)
    assert Integer(bits=4, group_size=32).quantize(weight).bits_per_weight == 4 + 16 / 32
    assert Integer(bits=4, group_size=32, symmetric=False).quantize(weight).bits_per_weight == 4 + (16 + 8) / 32
    assert Integer(bits=3, group_size=64).quantize(weight).bits_per_weight == 3 + 16 / 64
    hqq = Integer(bits=4, group_size=64, symmetric=False, zero_point_dtype="float16")
    assert hqq.quantize(weight).bits_per_weight == 4 + (16 + 16) / 64


@pytest.mark.parametrize("fields", [{"bits": 1}, {"bits": 9}, {"group_size": 0}, {"group_size": None}])
def test_impossible_fields_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(QbenchError, match="allowed"):
        Integer(**fields)
