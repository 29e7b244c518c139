"""GPTQ against optimal brain quantization done the long way in float64: the inverse Hessian of the columns still to
come is recomputed by elimination after every column, with no Cholesky factor and no lazy batches."""

import pytest
import torch

from qbench.calibration.hessian import relative_output_error
from qbench.formats.base import FORMATS, Format
from qbench.formats.codebook import NF4
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.formats.mx import MXFP4
from qbench.formats.nvfp4 import NVFP4
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest

INT4 = Integer(bits=4, group_size=32)


def layer(out: int = 24, width: int = 160, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a Hessian of correlated inputs with a few loud channels."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * width, width, generator=generator) @ torch.randn(width, width, generator=generator)
    inputs *= 1 + 5 * torch.rand(width, generator=generator) ** 8
    return torch.randn(out, width, generator=generator), inputs.T @ inputs / len(inputs)


def by_elimination(
    weight: torch.Tensor, hessian: torch.Tensor, format: Format, act_order: str, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The decoded weight, float64; 0 where `mask` is False."""
    mask = torch.ones_like(weight) if mask is None else mask.float()
    weight, hessian = weight.double(), hessian.double()
    width, size = weight.shape[1], format.block_size(weight.shape[1])
    order = torch.arange(width)
    if act_order != "none":
        order = hessian.diagonal().argsort(descending=True, stable=True)
    shared = format.shared(weight.float() * mask)
    static = [format.fit((weight * mask)[:, i : i + size].float(), shared) for i in range(0, width, size)]
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    weight, mask, inverse = weight[:, order], mask[:, order], torch.linalg.inv(hessian[order][:, order])
    decoded = torch.zeros_like(weight)
    for i in range(width):
        if act_order == "static" or size >= width:
            params = static[int(order[i]) // size]
        elif i % size == 0:
            params = format.fit((weight * mask)[:, i : i + size].float(), shared)
        column = weight[:, i : i + 1]
        codes = format.encode((column * mask[:, i : i + 1]).float(), params)
        decoded[:, i : i + 1] = format.decode(codes, params)
        error = (column - decoded[:, i : i + 1]) / inverse[i, i]
        weight -= error @ inverse[i : i + 1]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i], inverse[:, i] = 0, 0
    return decoded[:, order.argsort()]


@pytest.mark.parametrize("act_order", ["none", "static", "dynamic"])
@pytest.mark.parametrize(
    "format",
    [
        INT4,
        Integer(bits=3, group_size=64, symmetric=False),  # a partial last group
        Integer(bits=4, group_size=144),  # a group wider than a lazy batch
        Integer(bits=4, granularity="channel"),
        NF4(group_size=32),
        FP8("block"),  # rows share a scale
        NVFP4(),  # two levels of scale
        MXFP4(),
    ],
    ids=lambda format: f"{format.name}-{format.block_size(160)}",
)
def test_agrees_with_elimination_in_float64(format: Format, act_order: str) -> None:
    weight, hessian = layer()
    found = GPTQ(act_order=act_order).solve(weight, format, hessian).quantized.dequantize()
    expected = by_elimination(weight, hessian, format, act_order).float()
    assert (found - expected).abs().lt(1e-3).float().mean() > 0.97  # float32 lets some weights fall on the other side
    ours = relative_output_error(weight, found, hessian)
    assert ours == pytest.approx(relative_output_error(weight, expected, hessian), rel=0.02)


@pytest.mark.parametrize("name", FORMATS.names())
@pytest.mark.parametrize("act_order", ["none", "static", "dynamic"])
def test_beats_plain_rounding_in_every_format(name: str, act_order: str) -> None:
    format = FORMATS.get(name)()
    weight, hessian = layer(width=160 if format.for_width(160) is format else 512, seed=1)
    if GPTQ(act_order=act_order).refusal(format) is not None:
        assert act_order == "dynamic" and not format.any_order
        return
    solved = GPTQ(act_order=act_order).solve(weight, format, hessian).quantized.dequantize()
    rounded = Nearest().solve(weight, format, None).quantized.dequantize()
    assert relative_output_error(weight, solved, hessian) < 0.9 * relative_output_error(weight, rounded, hessian)


@pytest.mark.trap(21)
def test_g_idx_gives_each_column_its_group() -> None:
    weight, hessian = layer()
    quantized = GPTQ(act_order="dynamic").solve(weight, INT4, hessian).quantized
    order = hessian.diagonal().argsort(descending=True, stable=True)
    assert torch.equal(quantized.parts["g_idx"][order].long(), torch.arange(160) // 32)
    for act_order in ("none", "static"):
        assert "g_idx" not in GPTQ(act_order=act_order).solve(weight, INT4, hessian).quantized.parts


@pytest.mark.trap(8)
def test_dead_columns_and_zero_weights() -> None:
    weight, hessian = layer()
    hessian[7], hessian[:, 7] = 0, 0
    weight[:, 20] = 0
    solution = GPTQ().solve(weight, INT4, hessian)
    decoded = solution.quantized.dequantize()
    assert solution.dead_columns == 1
    assert torch.isfinite(decoded).all()
    assert torch.equal(decoded[:, 7], torch.zeros(24))
    assert relative_output_error(weight, decoded, hessian) < 0.2


@pytest.mark.trap(9)
def test_damping_is_raised_until_the_hessian_is_positive_definite() -> None:
    weight, hessian = layer()
    low = torch.linalg.eigvalsh(hessian)[0]
    hessian -= (low + 0.1 * hessian.diagonal().mean()) * torch.eye(160)
    solution = GPTQ().solve(weight, INT4, hessian)
    assert solution.fallback is None
    assert solution.damping is not None and 0.1 < solution.damping <= 0.32


@pytest.mark.trap(9)
def test_a_hopeless_hessian_falls_back_and_says_so() -> None:
    weight, hessian = layer()
    hessian[0, 1] = hessian[1, 0] = 1e6 * hessian.diagonal().mean()
    solution = GPTQ().solve(weight, INT4, hessian)
    assert solution.fallback is not None and "damping up to 10.2" in solution.fallback
    assert torch.equal(solution.quantized.dequantize(), INT4.quantize(weight).dequantize())


@pytest.mark.trap(10)
def test_fewer_tokens_than_inputs() -> None:
    weight, _ = layer(width=64)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    hessian = inputs.T @ inputs / 8
    solved = GPTQ().solve(weight, INT4, hessian).quantized.dequantize()
    rounded = INT4.quantize(weight).dequantize()
    assert relative_output_error(weight, solved, hessian) < relative_output_error(weight, rounded, hessian)


def test_inputs_are_left_as_they_were() -> None:
    weight, hessian = layer()
    before = weight.clone(), hessian.clone()
    GPTQ().solve(weight, INT4, hessian)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])
