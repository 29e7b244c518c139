"""Pruned weights: exactly zero after any solver, in every format that has a zero."""

import pytest
import torch

from qbench.calibration.hessian import relative_output_error
from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, Format
from qbench.formats.integer import Integer
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.solvers.test_gptq import by_elimination, layer

FOUND = [FORMATS.get(name)() for name in FORMATS.names()]
FOUND += [Integer(bits=3, group_size=64, symmetric=False), Integer(bits=4, symmetric=True, full_range=False)]
HOLDERS = [format for format in FOUND if format.holds_zero]
SOLVERS = [Nearest(), *(GPTQ(act_order=act_order) for act_order in ("none", "static", "dynamic"))]  # type: ignore[arg-type]


def pruned(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, its Hessian, and a mask that keeps the two larger of every four."""
    weight, hessian = layer(width=width)
    order = weight.abs().view(24, -1, 4).argsort(2).argsort(2)
    return weight, hessian, (order >= 2).view(24, width)


@pytest.mark.trap(24)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("format", HOLDERS, ids=str)
def test_masked_weights_decode_to_exactly_zero(format: Format, solver: Solver) -> None:
    if solver.refusal(format) is not None:
        return
    weight, hessian, mask = pruned(160 if format.for_width(160) is format else 512)
    decoded = solver.solve(weight, format, hessian, mask=mask).quantized.dequantize()
    assert bool((decoded[~mask] == 0).all())
    assert relative_output_error(weight * mask, decoded, hessian) < 0.8


@pytest.mark.parametrize("act_order", ["none", "static", "dynamic"])
@pytest.mark.parametrize(
    "format", [Integer(bits=4, group_size=32), Integer(bits=4, group_size=64, symmetric=False)], ids=str
)
def test_gptq_makes_good_the_error_of_pruned_weights(format: Format, act_order: str) -> None:
    """As SparseGPT (arXiv 2301.00774) does, by elimination in float64: the kept weights take over for the pruned."""
    weight, hessian, mask = pruned(160)
    solution = GPTQ(act_order=act_order).solve(weight, format, hessian, mask=mask)  # type: ignore[arg-type]
    found = solution.quantized.dequantize()
    expected = by_elimination(weight, hessian, format, act_order, mask).float()
    assert (found - expected).abs().lt(1e-3).float().mean() > 0.97
    assert relative_output_error(weight, found, hessian) < relative_output_error(weight, weight * mask, hessian)


def test_parameters_are_fitted_to_the_weights_that_stay() -> None:
    weight, hessian, mask = pruned(160)
    format = Integer(bits=4, group_size=32)
    alone = format.quantize(weight * mask).parts["scale"]
    for solver in (Nearest(), GPTQ(act_order="static")):
        assert torch.equal(solver.solve(weight, format, hessian, mask=mask).quantized.parts["scale"], alone)


def test_a_mask_that_keeps_everything_changes_nothing() -> None:
    weight, hessian, mask = pruned(160)
    for solver in SOLVERS:
        plain = solver.solve(weight, HOLDERS[0], hessian).quantized.dequantize()
        assert torch.equal(solver.solve(weight, HOLDERS[0], hessian, mask=mask | True).quantized.dequantize(), plain)


def test_formats_without_a_zero_are_refused() -> None:
    lacking = {format.name for format in FOUND if not format.holds_zero}
    assert lacking == {"q4_1", "q5_1", "q2_k", "q4_k", "q5_k"}
    weight, hessian, mask = pruned(512)
    float_zero = Integer(bits=4, symmetric=False, zero_point_dtype="float16")
    for format in [float_zero, *(FORMATS.get(name)() for name in lacking)]:
        for solver in (Nearest(), GPTQ()):
            with pytest.raises(QbenchError, match="no exact zero"):
                solver.solve(weight, format, hessian, mask=mask)


def test_given_shared_parameters_are_used() -> None:
    weight, hessian = layer()
    format = FORMATS.get("nvfp4")()
    shared = {"scale_2": torch.tensor([[0.5]])}
    for solver in SOLVERS:
        found = solver.solve(weight, format, hessian, shared=shared).quantized
        assert torch.equal(found.parts["scale_2"], shared["scale_2"])
