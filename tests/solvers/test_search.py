"""The search for a narrower range, against every candidate tried one by one in float64."""

import numpy as np
import pytest
import torch

from qbench.calibration.hessian import relative_output_error
from qbench.formats.base import FORMATS, Format
from qbench.formats.codebook import NF4
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest


def weight(out: int = 12, width: int = 160) -> torch.Tensor:
    """Heavy tails, so that clipping pays, and an offset."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(out, width, generator=generator)
    return 0.02 * normal * normal.abs().sqrt() + 0.005


def brute_force(group: np.ndarray, bits: int, symmetric: bool, importance: np.ndarray) -> tuple[float, np.ndarray]:
    """Least ``sum(importance * |error|^2.4)`` over p = 1, 0.99, ... 0.21 for one group, and the decoded group."""
    top = 2**bits - 1
    low, high = min(group.min(), 0.0), max(group.max(), 0.0)
    if symmetric:
        high = np.abs(group).max()
        low = -high
    best = (np.inf, group)
    for i in range(80):
        p = 1 - i / 100
        scale = (p * high - p * low) / top
        zero = (top + 1) / 2 if symmetric else np.round(-p * low / scale)
        decoded = (np.clip(np.round(group / scale) + zero, 0, top) - zero) * scale
        error = float((importance * np.abs(decoded - group) ** 2.4).sum())
        if error < best[0]:
            best = (error, decoded)
    return best


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
def test_finds_the_best_of_all_candidates(bits: int, symmetric: bool, weighed: bool) -> None:
    values = weight()
    format = Integer(bits=bits, group_size=64, symmetric=symmetric, scale_dtype="float32")  # groups of 64, 64 and 32
    squares = torch.rand(160, generator=torch.Generator().manual_seed(1)) ** 4
    solver = Nearest(search="mse", importance=weighed)
    decoded = solver.solve(values, format, torch.diag(squares) if weighed else None).quantized.dequantize().numpy()
    importance = squares.double().numpy() if weighed else np.ones(160)
    for row in range(12):
        for start, stop in ((0, 64), (64, 128), (128, 160)):
            group = values[row, start:stop].double().numpy()
            least, expected = brute_force(group, bits, symmetric, importance[start:stop])
            found = float((importance[start:stop] * np.abs(decoded[row, start:stop] - group) ** 2.4).sum())
            assert found == pytest.approx(least, rel=1e-3)
            if not symmetric and bits < 8:
                assert (np.abs(decoded[row, start:stop] - expected) < 1e-5).mean() > 0.9


def test_many_rows_are_searched_like_few() -> None:
    values = weight(out=1500)
    format = Integer(bits=3, granularity="channel")
    whole = Nearest(search="mse").solve(values, format, None).quantized.dequantize()
    apart = [Nearest(search="mse").solve(row, format, None).quantized.dequantize() for row in values[::250].split(1)]
    assert torch.equal(whole[::250], torch.cat(apart))


@pytest.mark.parametrize("name", FORMATS.names())
def test_is_no_worse_than_the_formats_own_range_in_any_format(name: str) -> None:
    format = FORMATS.get(name)()
    values = weight(width=512)
    rounded = Nearest().solve(values, format, None).quantized.dequantize()
    searched = Nearest(search="mse").solve(values, format, None).quantized.dequantize()
    errors = [(found - values).abs().pow(2.4).sum().item() for found in (searched, rounded)]
    assert errors[0] <= errors[1] * (1 + 1e-5)


@pytest.mark.parametrize("format", [Integer(bits=3, group_size=32), NF4(group_size=64)], ids=lambda f: f.name)
@pytest.mark.parametrize("act_order", ["none", "static", "dynamic"])
def test_gptq_profits_where_tails_are_heavy(format: Format, act_order: str) -> None:
    values = weight(out=32)
    inputs = torch.randn(640, 160, generator=torch.Generator().manual_seed(2))
    hessian = inputs.T @ inputs / 640
    errors = []
    for search in ("mse", "minmax"):
        solver = GPTQ(act_order=act_order, search=search)  # type: ignore[arg-type]
        errors.append(
            relative_output_error(values, solver.solve(values, format, hessian).quantized.dequantize(), hessian)
        )
    assert errors[0] < errors[1]


@pytest.mark.parametrize("format", [Integer(bits=8, granularity="tensor"), FP8(granularity="block")], ids=str)
def test_rows_that_share_a_scale_are_not_searched(format: Format) -> None:
    for solver in (Nearest(search="mse"), GPTQ(search="mse")):
        assert "allowed: minmax" in str(solver.refusal(format))
    assert Nearest().refusal(format) is None


def test_calibration_is_asked_for_only_where_errors_are_weighed() -> None:
    assert not Nearest(search="mse").uses_hessian
    assert Nearest(importance=True).uses_hessian
