"""Linears that read one tensor, solved together: as each would be alone, but for what engines that fuse them need."""

import pytest
import torch

from qbench.formats.base import FORMATS, Format
from qbench.formats.codebook import NF4
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.solvers.test_gptq import layer

FORMATS_OF_ALL_KINDS = [
    *(FORMATS.get(name)() for name in FORMATS.names()),
    Integer(bits=3, group_size=48, symmetric=False),
    Integer(bits=8, granularity="tensor"),
    NF4(group_size=32, double_quant=True),
    FP8("block"),
]


def three(width: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights of different heights and sizes, and the Hessian of what they read."""
    weight, hessian = layer(out=56, width=width)
    return [weight[:24], 3 * weight[24:32], weight[32:] / 5], hessian


@pytest.mark.parametrize("solver", [Nearest(), GPTQ(), GPTQ(act_order="none"), GPTQ(act_order="dynamic")], ids=str)
@pytest.mark.parametrize("format", FORMATS_OF_ALL_KINDS, ids=str)
def test_each_is_what_it_is_alone_under_its_shared_parameters(format: Format, solver: Solver) -> None:
    if solver.refusal(format) is not None:
        return
    weights, hessian = three(160 if format.for_width(160) is format else 512)
    hessian *= torch.block_diag(*[torch.ones(4, 4)] * (len(hessian) // 4))  # a weight's error moves 3 others at most
    shared = format.shared_among(weights)
    together = solver.solve_together(weights, format, hessian, shared=shared, masks=[None] * 3)
    for weight, own, solution in zip(weights, shared, together, strict=True):
        alone = solver.solve(weight, format, hessian, shared=own).quantized
        assert solution.quantized.shape == weight.shape
        assert {k: v.shape for k, v in solution.quantized.parts.items()} == {k: v.shape for k, v in alone.parts.items()}
        near = (solution.quantized.dequantize() - alone.dequantize()).abs() < 1e-6 * weight.abs().max()
        assert near.float().mean() > 0.995  # sums over other shapes let single weights fall on the other side


@pytest.mark.trap(28)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("solver", [Nearest(), GPTQ()], ids=str)
def test_nvfp4_has_one_global_scale_that_all_fit_under(solver: Solver, four_over_six: bool) -> None:
    format = FORMATS.get("nvfp4")(four_over_six=four_over_six)
    weights, hessian = three(160)
    shared = format.shared_among(weights)
    solutions = solver.solve_together(weights, format, hessian, shared=shared, masks=[None] * 3)
    for solution in solutions:
        assert torch.equal(solution.quantized.parts["scale_2"], format.shared(torch.cat(weights))["scale_2"])


def test_masks_are_each_weights_own() -> None:
    weights, hessian = three(160)
    masks = [None, torch.zeros(8, 160, dtype=torch.bool), weights[2] > 0]
    format = Integer(bits=4, group_size=32)
    solved = GPTQ().solve_together(weights, format, hessian, shared=[{}] * 3, masks=masks)
    decoded = [solution.quantized.dequantize() for solution in solved]
    assert torch.equal(decoded[0], GPTQ().solve(weights[0], format, hessian).quantized.dequantize())
    assert not decoded[1].any()
    assert bool((decoded[2][~(weights[2] > 0)] == 0).all())


@pytest.mark.trap(9)
def test_a_hopeless_hessian_is_told_of_each() -> None:
    weights, hessian = three(160)
    hessian[0, 1] = hessian[1, 0] = 1e6 * hessian.diagonal().mean()
    format = FORMATS.get("nvfp4")()
    shared = format.shared_among(weights)
    solved = GPTQ().solve_together(weights, format, hessian, shared=shared, masks=[None] * 3)
    for weight, own, solution in zip(weights, shared, solved, strict=True):
        assert solution.fallback is not None and "damping up to 10.2" in solution.fallback
        assert torch.equal(solution.quantized.dequantize(), format.quantize(weight, shared=own).dequantize())
