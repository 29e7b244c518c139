import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.bitpack import unpack_bits
from qbench.formats.nvfp4 import NVFP4
from tests.formats.judged import golden


def weight_of(judge: str, name: str) -> torch.Tensor:
    weight = golden(judge)[name].float()
    return weight[weight.abs().amax(1) < 1e3]


@pytest.mark.parametrize("name", ["random", "edges"])
def test_every_code_and_scale_is_model_optimizers(name: str) -> None:
    """Blocks of zeros, blocks whose scale is below E4M3's smallest value, ties and signed zeros included."""
    judge = golden("modelopt")
    quantized = NVFP4().quantize(weight_of("modelopt", name))
    assert torch.equal(quantized.parts["scale_2"].view(()), judge[f"nvfp4-{name}.scale_2"])
    assert torch.equal(quantized.parts["scale"].view(torch.uint8), judge[f"nvfp4-{name}.scale"].view(torch.uint8))
    assert torch.equal(quantized.parts["codes"], judge[f"nvfp4-{name}.codes"])
    if name == "edges":
        assert torch.equal(quantized.dequantize(), judge["nvfp4-edges.weight"])


def test_agrees_with_compressed_tensors_up_to_the_reciprocal() -> None:
    """It multiplies by a reciprocal tensor scale where we divide: a weight within one rounding of a tie may differ."""
    judge = golden("compressed_tensors")
    weight = weight_of("compressed_tensors", "random")
    quantized = NVFP4().quantize(weight)
    scale_2 = quantized.parts["scale_2"]
    assert 1 / scale_2.item() == pytest.approx(judge["nvfp4-random.global_scale"].item(), rel=2e-7)
    assert torch.equal(quantized.parts["scale"].view(torch.uint8), judge["nvfp4-random.scale"].view(torch.uint8))
    ours, theirs = (unpack_bits(c, 4, 256) for c in (quantized.parts["codes"], judge["nvfp4-random.codes"]))
    other = ours != theirs
    assert other.sum() <= 1
    relative = (weight / (quantized.parts["scale"].float() * scale_2).repeat_interleave(16, 1))[other].abs()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert ((relative.unsqueeze(1) - ties).abs().amin(1) < 1e-6).all()


def test_block_scales_of_compressed_tensors_at_the_edges() -> None:
    """The same E4M3 values, except where it stores 0.125, for zeros (ours 1) and underflow (ours 2^-9), and at a tie:
    464 / 6 * 3 = 232 lies between 224 and 240, and its reciprocal of 896 is a little too large."""
    expected = golden("compressed_tensors")["nvfp4-edges.scale"].float()
    found = NVFP4().quantize(weight_of("compressed_tensors", "edges")).parts["scale"].float()
    other = found != expected
    pairs = set(zip(found[other].tolist(), expected[other].tolist(), strict=True))
    assert pairs == {(1.0, 0.125), (2.0**-9, 0.125), (224.0, 240.0)}


@pytest.mark.trap(26)
def test_block_scales_saturate() -> None:
    weight = torch.zeros(2, 16)
    weight[0, 0], weight[1, 0] = 2688.0, 1.0
    quantized = NVFP4().quantize(weight)
    assert quantized.parts["scale"].float().tolist() == [[448.0], [0.171875]]
    assert quantized.dequantize()[0, 0] == 2688
    fitted = NVFP4().fit(
        torch.full((1, 16), 1e4), {"scale_2": torch.ones(1, 1)}
    )  # a weight grown since scale_2 was found
    assert fitted["scale"].item() == 448


@pytest.mark.trap(27)
@pytest.mark.parametrize("four_over_six", [False, True])
def test_zeros_decode_to_zeros(four_over_six: bool) -> None:
    weight = torch.randn(4, 64)
    weight[1] = 0
    weight[2, 16:32] = 0
    for case in (weight, torch.zeros(4, 64)):
        quantized = NVFP4(four_over_six).quantize(case)
        assert (quantized.parts["scale"].view(torch.uint8) & 127 != 127).all()
        decoded = quantized.dequantize()
        assert torch.isfinite(decoded).all()
        assert torch.equal(decoded[1], torch.zeros(64)) and torch.equal(decoded[2, 16:32], torch.zeros(16))


@pytest.mark.trap(28)
def test_fused_linears_share_the_tensor_scale() -> None:
    """The scale of several weights is that of the weight they would be if stacked."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 64, generator=generator) * size for rows, size in ((32, 1.0), (8, 3.0), (8, 0.1))]
    for format in (NVFP4(), NVFP4(four_over_six=True)):
        together = format.quantize(torch.cat(weights))
        assert torch.equal(format.shared_among(weights)[1]["scale_2"], together.parts["scale_2"])
        for weight, rows in zip(weights, together.parts["scale"].split([32, 8, 8]), strict=True):
            blocks = format.fit(weight.reshape(-1, 16), format.shared_among(weights)[0])
            assert torch.equal(blocks["scale"].view(rows.shape), rows.float())


@pytest.mark.parametrize("name", ["random", "edges"])
def test_both_scales_of_four_over_six_are_model_optimizers(name: str) -> None:
    """Every block of weights has one of its two scales, that with the smaller error in float64."""
    judge, weight = golden("modelopt"), weight_of("modelopt", name)
    quantized = NVFP4(four_over_six=True).quantize(weight)
    scale_2 = judge[f"four_over_six-{name}.scale_2"]
    assert torch.equal(quantized.parts["scale_2"].view(()), scale_2)
    blocks = weight.double().unflatten(1, (-1, 16))
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    errors = []
    for top in (6, 4):
        unit = (judge[f"four_over_six-{name}.scale_{top}"].double() * scale_2.double()).unsqueeze(-1)
        decoded = levels[((blocks.abs() / unit).unsqueeze(-1) - levels).abs().argmin(-1)] * unit
        errors.append((decoded - blocks.abs()).square().sum(-1))
    six, four = (judge[f"four_over_six-{name}.scale_{top}"].float() for top in (6, 4))
    clear = (errors[0] - errors[1]).abs() > 1e-5 * (errors[0] + errors[1])
    expected = torch.where(errors[1] < errors[0], four, six)
    assert torch.equal(quantized.parts["scale"].float()[clear], expected[clear])
    assert clear.float().mean() > 0.2
    found = (quantized.dequantize().double() - weight.double()).square().unflatten(1, (-1, 16)).sum(-1)
    assert (found <= torch.minimum(*errors) * (1 + 1e-5) + 1e-30).all()


def test_importance_decides_between_four_and_six() -> None:
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([6.0, 4.5, 3.0])
    scale_2 = {"scale_2": torch.ones(1, 1)}
    format = NVFP4(four_over_six=True)
    second, third = torch.zeros(1, 16), torch.zeros(1, 16)
    second[0, 1] = third[0, 2] = 1
    assert format.fit(weight, scale_2, second)["scale"].item() == 1.5  # 4.5 is a level times 1.5
    assert format.fit(weight, scale_2, third)["scale"].item() == 1.0


def test_four_over_six_lowers_the_error() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    plain, chosen = (
        (NVFP4(four_over_six).quantize(weight).dequantize() - weight).square().mean() for four_over_six in (False, True)
    )
    assert chosen < 0.95 * plain


def test_a_partial_last_block_and_bits() -> None:
    weight = torch.randn(8, 40)
    quantized = NVFP4().quantize(weight)
    assert quantized.parts["scale"].shape == (8, 3)
    assert quantized.dequantize().shape == (8, 40)
    assert NVFP4().quantize(torch.randn(64, 128)).bits_per_weight == 4.5 + 32 / (64 * 128)


def test_nan_is_refused() -> None:
    with pytest.raises(QbenchError, match="format nvfp4: a weight is NaN or infinite"):
        NVFP4().quantize(torch.full((1, 16), float("nan")))
