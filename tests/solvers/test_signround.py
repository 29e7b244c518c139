"""Learned rounding against AutoRound's own trajectory, and over every format there is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qbench.calibration.hessian import relative_output_error
from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, Format
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.solvers.rounding import Rounding
from qbench.solvers.signround import NO_GAIN, SignRound

INT4 = Integer(bits=4, group_size=32)
OTHERS = [
    INT4,
    Integer(bits=4, group_size=32, signed_scale=True),
    Integer(bits=4, group_size=48, symmetric=False),  # a partial last group
    Integer(bits=3, group_size=64, symmetric=False, zero_point_dtype="float16"),
    Integer(bits=4, granularity="channel", full_range=False),
    Integer(bits=4, granularity="tensor"),
    FP8("tensor"),
    FP8("block", element="e5m2"),
]
EVERY = [FORMATS.get(name)() for name in FORMATS.names()] + OTHERS


def layer(out: int = 24, width: int = 160) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a Hessian of inputs that have a mean, so that errors add up."""
    generator = torch.Generator().manual_seed(0)
    inputs = 1 + torch.randn(4 * width, width, generator=generator)
    return torch.randn(out, width, generator=generator), inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("kind", ["asym", "sym"])
def test_takes_the_steps_that_autoround_takes(kind: str) -> None:
    """Errors before each step, and the best weight."""
    golden = load_file(Path(__file__).parent / "golden" / "signround.safetensors")
    weight, hessian, expected = golden[f"{kind}.weight"], golden["hessian"], golden[f"{kind}.errors"].tolist()
    signed = kind == "sym"
    format = Integer(bits=4, group_size=32, symmetric=signed, signed_scale=signed, scale_dtype="float32")
    rounding, solver = Rounding(weight, format), SignRound(iters=len(expected), lr=0.02)
    for iteration, error in enumerate(expected):
        difference = rounding.decoded() - weight
        gradient = difference @ hessian
        assert float((gradient * difference).sum()) == pytest.approx(error, rel=1e-4)
        rounding.step(gradient, solver.lr_at(iteration))
    solved = solver.solve(weight, format, hessian).quantized.dequantize()
    assert torch.allclose(solved, golden[f"{kind}.best"], atol=1e-5)


@pytest.mark.parametrize("format", EVERY, ids=str)
def test_starts_from_plain_rounding_and_ends_lower_in_every_format(format: Format) -> None:
    weight, hessian = layer(width=160 if format.for_width(160) is format else 256)
    plain = format.quantize(weight).dequantize()
    assert torch.equal(Rounding(weight, format).quantized().dequantize(), plain)
    solution = SignRound(iters=20, lr=0.01).solve(weight, format, hessian)
    assert solution.fallback is None
    learned = solution.quantized.dequantize()
    assert relative_output_error(weight, learned, hessian) < relative_output_error(weight, plain, hessian)


def test_what_is_stored_is_what_was_last_decoded() -> None:
    for format in OTHERS:
        weight, hessian = layer()
        rounding = Rounding(weight, format)
        for _ in range(3):
            rounding.step((rounding.decoded() - weight) @ hessian, 0.1)
        assert torch.equal(rounding.decoded(), rounding.quantized().dequantize())


@pytest.mark.parametrize("solver", [SignRound(iters=0), SignRound(iters=5, lr=0.0)], ids=str)
def test_without_steps_it_is_plain_rounding_and_says_so(solver: SignRound) -> None:
    weight, hessian = layer()
    solution = solver.solve(weight, INT4, hessian)
    assert torch.equal(solution.quantized.dequantize(), INT4.quantize(weight).dequantize())
    assert solution.fallback == NO_GAIN


def test_offsets_stay_within_half_a_step_and_ranges_within_the_weights() -> None:
    weight, hessian = layer()
    rounding = Rounding(weight, INT4)
    for _ in range(4):
        rounding.step((rounding.decoded() - weight) @ hessian, 0.4)
    (run,) = rounding.runs
    assert run.offset.abs().max() == 0.5
    assert run.low.min() >= 0 and run.low.max() <= 1 and run.high.min() >= 0 and run.high.max() <= 1


def test_ranges_can_be_left_as_they_are() -> None:
    weight, hessian = layer()
    quantized = SignRound(iters=10, lr=0.02, ranges=False).solve(weight, INT4, hessian).quantized
    assert torch.equal(quantized.parts["scale"], INT4.quantize(weight).parts["scale"])
    assert not torch.equal(quantized.parts["codes"], INT4.quantize(weight).parts["codes"])


@pytest.mark.trap(24)
def test_pruned_weights_stay_zero() -> None:
    weight, hessian = layer()
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    for format in (INT4, Integer(bits=4, group_size=32, symmetric=False), FORMATS.get("nvfp4")()):
        decoded = SignRound(iters=10).solve(weight, format, hessian, mask=mask).quantized.dequantize()
        assert torch.equal(decoded[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.trap(27)
@pytest.mark.parametrize("name", FORMATS.names())
def test_a_weight_of_zeros_stays_finite(name: str) -> None:
    format = FORMATS.get(name)()
    decoded = SignRound(iters=3).solve(torch.zeros(4, 256), format, torch.eye(256)).quantized.dequantize()
    assert torch.equal(decoded, torch.zeros(4, 256))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"iters": -1}, "iters is -1"), ({"lr": -0.1}, "lr is -0.1"), ({"batch_rows": 0}, "batch_rows is 0")],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(QbenchError, match=f"solver signround: {message}; allowed:"):
        SignRound(**fields)  # type: ignore[arg-type]
