import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.bitpack import unpack_bits
from qbench.formats.codebook import NF4, NF4_LEVELS


@pytest.mark.trap(4)
def test_fifteen_elements_in_blocks_of_64() -> None:
    weight = torch.randn(1, 15, generator=torch.Generator().manual_seed(0))
    quantized = NF4().quantize(weight)
    assert quantized.parts["codes"].numel() == 8
    assert quantized.parts["absmax"].shape == (1, 1)
    assert quantized.dequantize().shape == (1, 15)
    assert torch.isfinite(quantized.dequantize()).all()


def test_codes_are_the_nearest_levels() -> None:
    """Against a float64 search over all sixteen levels."""
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    quantized = NF4(group_size=64).quantize(weight)
    blocks = weight.double().reshape(16, 2, 64)
    relative = blocks / blocks.abs().amax(2, keepdim=True)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    expected = (relative.unsqueeze(-1) - levels).abs().argmin(-1).reshape(16, 128)
    assert torch.equal(unpack_bits(quantized.parts["codes"], 4, 128).long(), expected)


def test_the_table_is_the_normal_distributions() -> None:
    """The levels are quantiles of the standard normal at offset 0.9677083, scaled to 1 (QLoRA, appendix E)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([negative, torch.zeros(1), positive.flip(0)])
    assert torch.allclose(values / values.abs().max(), torch.tensor(NF4_LEVELS, dtype=torch.float64), atol=1e-6)


def test_a_block_of_zeros_stays_zero() -> None:
    assert torch.equal(NF4().quantize(torch.zeros(2, 64)).dequantize(), torch.zeros(2, 64))


def test_nan_is_refused() -> None:
    with pytest.raises(QbenchError, match="NaN"):
        NF4().quantize(torch.full((1, 64), float("nan")))


def test_four_and_a_half_bits() -> None:
    assert NF4().quantize(torch.randn(4, 128)).bits_per_weight == 4.5
