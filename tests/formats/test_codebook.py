import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.bitpack import unpack_bits
from qbench.formats.codebook import FP4, NF4, NF4_LEVELS, Codebook, dynamic_map
from tests.formats.judged import golden, swap_nibbles

KINDS = [NF4, FP4]


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_are_those_of_bitsandbytes(kind: type[Codebook]) -> None:
    assert torch.equal(torch.tensor(kind.levels), golden("bitsandbytes")[f"{kind.name}.levels"])
    assert torch.equal(dynamic_map(), golden("bitsandbytes")["dynamic_map"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weight", "group"), [("random", 32), ("random", 64), ("random", 256), ("edges", 32)])
def test_every_code_and_scale_is_bitsandbytes(kind: type[Codebook], weight: str, group: int) -> None:
    """Random bfloat16 weights; and ties, zeros of both signs, blocks of zeros, subnormal and huge blocks."""
    judge = golden("bitsandbytes")
    values = judge["random" if weight == "random" else f"{kind.name}.edges"].float()
    for double_quant in (False, True):
        quantized = kind(group_size=group, double_quant=double_quant).quantize(values)
        assert torch.equal(
            swap_nibbles(quantized.parts["codes"]).flatten(), judge[f"{kind.name}-{weight}-{group}.codes"]
        )
        assert len(quantized.parts) == (4 if double_quant else 2)
        for part in quantized.parts.keys() - {"codes"}:
            expected = judge[f"{kind.name}-{weight}-{group}.{part}"]
            assert torch.equal(quantized.parts[part].flatten(), expected.flatten()), part


@pytest.mark.parametrize("kind", KINDS)
def test_double_quantization_is_decoded_as_stored(kind: type[Codebook]) -> None:
    judge = golden("bitsandbytes")
    quantized = kind(group_size=32, double_quant=True).quantize(judge["random"].float())
    nested = judge["dynamic_map"].double()[judge[f"{kind.name}-random-32.absmax_codes"].long()]
    scale = judge[f"{kind.name}-random-32.absmax_scale"].double().repeat_interleave(256)[: len(nested)]
    absmax = nested * scale + judge[f"{kind.name}-random-32.absmax_offset"].double()
    codes = unpack_bits(quantized.parts["codes"], 4, 256).long()
    expected = torch.tensor(kind.levels, dtype=torch.float64)[codes] * absmax.view(40, 8).repeat_interleave(32, 1)
    torch.testing.assert_close(quantized.dequantize().double(), expected, rtol=1e-6, atol=1e-9)


def test_double_quantization_of_equal_blocks() -> None:
    """Every absmax is their mean: the second level has nothing to say and must not divide by zero."""
    quantized = NF4(double_quant=True).quantize(torch.full((4, 128), 0.25))
    assert torch.equal(quantized.dequantize(), torch.full((4, 128), 0.25))
    assert torch.equal(NF4(double_quant=True).quantize(torch.zeros(2, 64)).dequantize(), torch.zeros(2, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_zeros_stays_zero(kind: type[Codebook]) -> None:
    assert torch.equal(kind().quantize(torch.zeros(2, 64)).dequantize(), torch.zeros(2, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_refused(kind: type[Codebook]) -> None:
    with pytest.raises(QbenchError, match=f"format {kind.name}: a weight is NaN"):
        kind().quantize(torch.full((1, 64), float("nan")))


def test_four_and_a_half_bits() -> None:
    assert NF4().quantize(torch.randn(4, 128)).bits_per_weight == 4.5


def test_bits_with_double_quantization() -> None:
    quantized = NF4(double_quant=True).quantize(torch.randn(256, 256))
    assert quantized.bits_per_weight == 4 + 8 / 64 + 32 / (64 * 256) + 32 / 256**2  # 4.127, and the offset
