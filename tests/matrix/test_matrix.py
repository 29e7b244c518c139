"""Any solver over any format, with any transform, on every model family, through transformers' own code.

Members come from the registries: what is registered is tested here. Every cell must be finite and near the model it
started from; whatever a method claims to minimise must be no worse than plain rounding, in every single layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from qbench.calibration.hessian import relative_output_error
from qbench.compress.engine import Compression, compress
from qbench.formats.activation import ACTIVATIONS
from qbench.formats.base import FORMATS, Format, QuantizedTensor
from qbench.formats.integer import Integer
from qbench.formats.kv_cache import KV_FORMATS
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import SOLVERS, Solution, Solver
from qbench.solvers.nearest import Nearest
from qbench.transforms.base import TRANSFORMS, Choice, Readers, Transform
from qbench.transforms.hadamard import Rotated
from qbench.transforms.prune import PRUNERS
from tests.compress.test_engine import token_rows
from tests.families import FAMILIES, logits, make_family, random_model

ROWS = token_rows(12, 24)
HELD_OUT = torch.tensor(token_rows(2, 16, seed=9))
INT8 = Integer(bits=8, group_size=32)
SHORT = {"iters": 4, "grid": 4}  # searches that would take long
NEAR = {8.3: 0.05, 8: 0.15, 6: 0.25, 4: 0.6, 2: 0.8}  # relative change of the logits, by bits a weight, at most
ROTATION = "rotation"


def quick(member: Any) -> Any:
    """An instance with its defaults, but short searches."""
    return member(**{field.name: SHORT[field.name] for field in fields(member) if field.name in SHORT})


def every(registry: Any) -> list[Any]:
    return [quick(registry.get(name)) for name in registry.names()]


def allowed(solver: Solver, format: Format) -> Format:
    """`format`, or one with float zero points of as many bits for a solver that refuses it."""
    if solver.refusal(format) is None:
        return format
    bits = 8 if bits_of(format) >= 8 else 4
    other = Integer(bits=bits, group_size=32, symmetric=False, zero_point_dtype="float16")
    assert solver.refusal(other) is None, solver
    return other


@cache
def bits_of(format: Format) -> float:
    return format.quantize(torch.ones(256, 256)).bits_per_weight


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ModelSource]:
    @cache
    def model(family: str, width: int) -> ModelSource:
        return open_model(make_family(tmp_path_factory.mktemp(f"{family}-{width}"), family, width))

    return model


@cache
def reference(source: ModelSource) -> torch.Tensor:
    return logits(source, HELD_OUT)


def linears(source: ModelSource) -> list[str]:
    """What is compressed: all linears, of the wide models those of the second block."""
    names = linear_names(source.tensors, source.config)
    return [name for name in names if source.config["hidden_size"] < 256 or ".layers.1." in name]


def run(source: ModelSource, scheme: Scheme, folder: Path, *, rotate: bool = False) -> Compression:
    start = Rotated(source, seed=0) if rotate else source
    return compress(start, dict.fromkeys(linears(source), scheme), ROWS, folder / "model", key="k")


def check(done: Compression, source: ModelSource, scheme: Scheme) -> None:
    """Every linear is in the format, every number finite, and the logits near the source's."""
    names = linears(source)
    assert {layer.module for layer in done.layers} == set(names)
    for name in names:
        stored = done.model.load(f"{name}.weight")
        assert isinstance(stored, QuantizedTensor)
        assert stored.format == scheme.format
        assert bool(torch.isfinite(stored.dequantize()).all())
    for layer in done.layers:
        assert layer.fallback in (None, "no calibration token reached it", "learned rounding did not lower the error")
    found, expected = logits(done.model, HELD_OUT), reference(source)
    assert bool(torch.isfinite(found).all())
    near = next(limit for bits, limit in NEAR.items() if bits_of(scheme.format) >= bits)
    change = float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
    assert change <= (near if scheme.activation is None else NEAR[4])


def by_output(weight: torch.Tensor, decoded: torch.Tensor, hessian: torch.Tensor | None) -> float:
    assert hessian is not None
    return relative_output_error(weight, decoded, hessian)


def by_weight(weight: torch.Tensor, decoded: torch.Tensor, hessian: torch.Tensor | None) -> float:
    return float((weight - decoded).abs().double().pow(2.4).sum())


def by_magnitude(weight: torch.Tensor, decoded: torch.Tensor, hessian: torch.Tensor | None) -> float:
    return float((weight - decoded).abs().double().sum())


CLAIMS = {"gptq": by_output, "signround": by_output, "nearest": by_weight, "hqq": by_magnitude}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compares every layer that is solved on its own with plain rounding, and every choice of scales with none."""
    compared: list[str] = []
    for solver in {SOLVERS.get(name) for name in SOLVERS.names()}:
        monkeypatch.setattr(solver, "solve_together", _compared(solver.solve_together, compared))
    for transform in {TRANSFORMS.get(name) for name in TRANSFORMS.names()}:
        monkeypatch.setattr(transform, "choose", _no_worse_than_none(transform.choose, compared))
    yield compared


def _compared(solve: Any, compared: list[str]) -> Any:
    def solved(
        self: Solver, weights: Any, format: Format, hessian: torch.Tensor | None, *, shared: Any, masks: Any
    ) -> list[Solution]:
        before = [weight.clone() for weight in weights]
        solutions: list[Solution] = solve(self, weights, format, hessian, shared=shared, masks=masks)
        measure = CLAIMS.get(self.name)
        for weight, own, solution in zip(before, shared, solutions, strict=True):
            if measure is not None and solution.fallback is None:
                ours, plain = (q.dequantize() for q in (solution.quantized, format.quantize(weight, shared=own)))
                assert measure(weight, ours, hessian) <= measure(weight, plain, hessian) * (1 + 1e-6), (self, format)
                compared.append(self.name)
        return solutions

    return solved


def _no_worse_than_none(choose: Any, compared: list[str]) -> Any:
    def chosen(self: Transform, readers: Readers) -> Choice | None:
        choice: Choice | None = choose(self, readers)
        if self.name == "awq":
            assert choice is not None
            assert choice.detail["loss"] <= readers.loss(torch.ones_like(choice.scales))
            compared.append(self.name)
        return choice

    return chosen


@pytest.mark.parametrize("format", [INT8, FORMATS.get("nvfp4")()], ids=lambda format: format.name)
@pytest.mark.parametrize("transform", [None, *every(TRANSFORMS), ROTATION], ids=lambda t: getattr(t, "name", str(t)))
@pytest.mark.parametrize("solver", every(SOLVERS), ids=lambda solver: solver.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_solver_with_every_transform(
    tmp_path: Path, models: Any, judged: list[str], family: str, solver: Solver, transform: Any, format: Format
) -> None:
    source = models(family, 64)
    rotate = transform == ROTATION
    scheme = Scheme(allowed(solver, format), solver, None if rotate else transform)
    check(run(source, scheme, tmp_path, rotate=rotate), source, scheme)


@pytest.mark.parametrize("format", every(FORMATS), ids=lambda format: format.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_format(tmp_path: Path, models: Any, judged: list[str], family: str, format: Format) -> None:
    """By GPTQ, which drives a format column by column; K-quants on wider models."""
    if isinstance(format, Integer):
        format = replace(format, bits=4, group_size=32)
    source = models(family, 64 if format.for_width(64) is format else 256)
    scheme = Scheme(format, SOLVERS.get("gptq")())
    check(run(source, scheme, tmp_path), source, scheme)
    assert "gptq" in judged


@pytest.mark.parametrize("family", FAMILIES)
def test_a_searched_range_is_no_worse_than_the_whole(
    tmp_path: Path, models: Any, judged: list[str], family: str
) -> None:
    scheme = Scheme(Integer(bits=4, group_size=32), Nearest(search="mse"))
    check(run(models(family, 64), scheme, tmp_path), models(family, 64), scheme)
    assert "nearest" in judged


@pytest.mark.parametrize("activation", every(ACTIVATIONS), ids=lambda activation: activation.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_activation_format(tmp_path: Path, models: Any, family: str, activation: Any) -> None:
    """The linears' inputs are rounded in transformers' model too, but for the experts' fused ones."""
    source = models(family, 64)
    scheme = Scheme(INT8, Nearest(), activation=activation)
    done = run(source, scheme, tmp_path)
    check(done, source, scheme)
    for name in linears(source):
        stored = done.model.load(f"{name}.weight")
        assert isinstance(stored, QuantizedTensor)
        assert stored.activation == activation


@pytest.mark.parametrize("name", PRUNERS.names())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pruning(tmp_path: Path, models: Any, family: str, name: str) -> None:
    """2:4 in every row of every linear, after GPTQ."""
    source = models(family, 64)
    scheme = Scheme(INT8, SOLVERS.get("gptq")(), prune=PRUNERS.get(name)(pattern="2:4"))
    done = run(source, scheme, tmp_path)
    for name in linears(source):
        stored = done.model.load(f"{name}.weight")
        assert isinstance(stored, QuantizedTensor)
        assert int((stored.dequantize().unflatten(1, (-1, 4)) != 0).sum(2).max()) == 2
    assert bool(torch.isfinite(logits(done.model, HELD_OUT)).all())


@pytest.mark.parametrize("name", KV_FORMATS.names())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_value_format(tmp_path: Path, models: Any, family: str, name: str) -> None:
    """Scales of the first block against the keys and values that transformers' own cache holds."""
    source = models(family, 64)
    group = {"group_size": 16} if any(field.name == "group_size" for field in fields(KV_FORMATS.get(name))) else {}
    format = KV_FORMATS.get(name)(**group)
    done = compress(source, {}, ROWS, tmp_path / "model", key="k", kv_cache=format)
    cache = done.model.kv_cache
    assert cache is not None
    assert cache.format == format
    if not format.calibrated:
        assert cache.scales == ()
        return
    with torch.no_grad():
        wide = random_model(family, sliding_window=64)  # the window does not change keys, but a cache is cut to it
        held = wide(torch.tensor(ROWS), use_cache=True).past_key_values.layers[0]
    for scale, tensor in zip(cache.scales[0], (held.keys, held.values), strict=True):
        assert scale == pytest.approx(float(tensor.abs().max()) / 448, rel=1e-5)
