"""HQQ against what the hqq package gave (golden/make_hqq.py), and against its published algorithm in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qbench.errors import QbenchError
from qbench.formats.base import Format
from qbench.formats.bitpack import unpack_bits
from qbench.formats.codebook import NF4
from qbench.formats.integer import Integer
from qbench.recipe import load_recipe
from qbench.solvers.hqq import HQQ
from qbench.solvers.nearest import Nearest

GOLDEN = load_file(Path(__file__).parent / "golden" / "hqq.safetensors")
WEIGHT = GOLDEN["weight"]


def format_of(bits: int, stored: str = "float32", group_size: int = 32) -> Integer:
    return Integer(
        bits=bits,
        group_size=group_size,
        symmetric=False,
        scale_dtype=stored,  # type: ignore[arg-type]
        zero_point_dtype=stored,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_agrees_with_the_hqq_package(bits: int) -> None:
    parts = HQQ().solve(WEIGHT, format_of(bits), None).quantized.parts
    torch.testing.assert_close(parts["scale"], GOLDEN[f"v2.{bits}.scale"], rtol=1e-6, atol=0)
    torch.testing.assert_close(parts["zero_point"], GOLDEN[f"v2.{bits}.zero"], rtol=1e-5, atol=1e-5)
    same = unpack_bits(parts["codes"], bits, 128) == GOLDEN[f"v2.{bits}.codes"]
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_error_is_no_worse_than_the_packages_default_and_than_plain_rounding(bits: int, stored: str) -> None:
    scale, zero = (GOLDEN[f"default.{bits}.{name}"] for name in ("scale", "zero"))
    if stored == "float16":
        scale, zero = scale.half().float(), zero.half().float()
    theirs = (GOLDEN[f"default.{bits}.codes"].view(24, 4, 32) - zero.unsqueeze(2)) * scale.unsqueeze(2)
    format = format_of(bits, stored)
    ours = HQQ().solve(WEIGHT, format, None).quantized.dequantize()
    rounded = Nearest().solve(WEIGHT, format, None).quantized.dequantize()
    error = (ours - WEIGHT).abs().mean()
    worse = 1.005 if stored == "float16" else 1.0001  # rounding a scale moves the errors of 3072 weights either way
    assert error <= worse * (theirs.reshape(24, 128) - WEIGHT).abs().mean()
    assert error < 0.98 * (rounded - WEIGHT).abs().mean()


def half_quadratic(weight: np.ndarray, bits: int, iterations: int, p: float, beta: float, kappa: float) -> np.ndarray:
    """The decoded groups (rows of `weight`, float64)."""
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    zero = kept = -low / scale
    least = np.inf
    for _ in range(iterations):
        codes = np.clip(np.round(weight / scale + zero), 0, 2**bits - 1)
        error = weight - (codes - zero) * scale
        if np.abs(error).mean() >= least:
            zero = kept
            break
        kept, least = zero, np.abs(error).mean()
        outliers = np.sign(error) * np.maximum(np.abs(error) - np.abs(error) ** (p - 1) / beta, 0)
        zero = (codes - (weight - outliers) / scale).mean(1, keepdims=True)
        beta *= kappa
    return (np.clip(np.round(weight / scale + zero), 0, 2**bits - 1) - zero) * scale


@pytest.mark.parametrize(
    ("iterations", "p", "beta", "kappa"), [(20, 0.7, 10.0, 1.01), (7, 0.5, 40.0, 1.2), (3, 1, 30, 1)]
)
def test_agrees_with_float64(iterations: int, p: float, beta: float, kappa: float) -> None:
    solver = HQQ(iterations=iterations, lp_norm=p, beta=beta, kappa=kappa)
    found = solver.solve(WEIGHT, format_of(4), None).quantized.dequantize().double().numpy().reshape(-1, 32)
    expected = half_quadratic(WEIGHT.double().numpy().reshape(-1, 32), 4, iterations, p, beta, kappa)
    assert (np.abs(found - expected) < 1e-6).mean() > 0.999


def test_a_partial_last_group_and_many_rows() -> None:
    weight = torch.randn(9000, 80, generator=torch.Generator().manual_seed(0))  # more than one chunk of rows
    found = HQQ().solve(weight, format_of(4), None).quantized.dequantize()
    for start, stop in ((0, 64), (64, 80)):
        part = weight[:, start:stop].double().numpy().reshape(-1, min(32, stop - start))
        expected = half_quadratic(part, 4, 20, 0.7, 10.0, 1.01).reshape(9000, -1)
        assert (np.abs(found[:, start:stop].numpy() - expected) < 1e-5).mean() > 0.999


def test_constant_and_zero_groups_stay_what_they_are() -> None:
    weight = torch.cat([torch.full((4, 32), 3.7), torch.zeros(4, 32)], 1)
    found = HQQ().solve(weight, format_of(4, "float16"), None).quantized.dequantize()
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "format",
    [
        NF4(),
        Integer(bits=4, group_size=32),
        Integer(bits=4, group_size=32, symmetric=False),
        Integer(bits=4, granularity="tensor", symmetric=False, zero_point_dtype="float16"),
    ],
    ids=str,
)
def test_formats_without_a_movable_zero_point_are_refused(format: Format) -> None:
    assert "zero_point_dtype float16 or float32" in str(HQQ().refusal(format))


def test_a_recipe_is_refused_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "model: {source: some/model}\nvariants:\n"
        "  a: {preset: hqq, format: {name: nf4}}\n"
        "  b: {preset: hqq, rules: [{match: lm_head, format: {symmetric: true, zero_point_dtype: uint8}}]}\n"
    )
    with pytest.raises(QbenchError, match="variants") as caught:
        load_recipe(file)
    assert "variants.a" in str(caught.value) and "rules[0]: solver hqq" in str(caught.value)


@pytest.mark.parametrize("field", ["iterations", "lp_norm", "beta", "kappa"])
def test_impossible_fields_are_refused(field: str) -> None:
    with pytest.raises(QbenchError, match=f"{field} is 0; allowed"):
        HQQ(**{field: 0})  # type: ignore[arg-type]
