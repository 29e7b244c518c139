"""Formats of keys and values against float64, compressed-tensors (FP8) and gguf-py (the same parameters in blocks)."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from qbench.errors import QbenchError
from qbench.formats.kv_cache import FP8KV, KV_FORMATS, Int4KV, Int8KV, IntegerKV, KVCache, KVFormat, kv_format_from_dict
from tests.formats.judged import golden

INTEGERS = [
    Int8KV(),
    Int4KV(),
    Int8KV(group_size=16),
    Int4KV(group_size=16),
    Int8KV(symmetric=False),
    Int4KV(symmetric=True),
]
FORMATS: list[KVFormat] = [FP8KV(), *INTEGERS]


def keys_like(tokens: int = 20, heads: int = 3, dim: int = 64, seed: int = 0) -> torch.Tensor:
    """Keys as models have them: a few channels far out and off centre, tokens of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator) * torch.rand(tokens, heads, 1, generator=generator)
    x[..., 5] += 12
    x[..., 40] -= 30
    return x


def groups(x: torch.Tensor, format: IntegerKV) -> np.ndarray:
    """Float64 ``[tokens, heads, groups, channels of a group]``."""
    return x.double().numpy().reshape(*x.shape[:2], -1, format.group_size or x.shape[2])


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(np.float16).astype(np.float64)


def unpacked(codes: torch.Tensor, bits: int) -> np.ndarray:
    found = codes.numpy()
    if bits == 8:
        return found.astype(np.float64)
    both = np.empty((*found.shape[:-1], 2 * found.shape[-1]))
    both[..., 0::2], both[..., 1::2] = found % 16, found // 16
    return both


@pytest.mark.parametrize("format", INTEGERS, ids=repr)
def test_integers_are_those_of_float64(format: IntegerKV) -> None:
    x = keys_like()
    parts = format.encode(x)
    grouped, top = groups(x, format), 2**format.bits - 1
    if format.symmetric:
        scale, minimum = half(np.abs(grouped).max(-1) / (top // 2)), np.zeros(())
        exact = grouped / scale[..., None] + 2 ** (format.bits - 1)
    else:
        low, high = grouped.min(-1), grouped.max(-1)
        scale, minimum = half((high - low) / top), half(low)
        assert np.array_equal(parts["minimum"].numpy(), minimum)
        exact = (grouped - minimum[..., None]) / scale[..., None]
    assert np.array_equal(parts["scale"].numpy(), scale)
    assert parts["scale"].dtype == torch.float16
    codes = unpacked(parts["codes"], format.bits).reshape(exact.shape)
    nearest = np.abs(codes - exact.clip(0, top))
    assert nearest.max() < 0.5 + 1e-4  # the nearest code; float32 division may move a tie
    zero = 2 ** (format.bits - 1) if format.symmetric else 0
    expected = (codes - zero) * scale[..., None] + (0 if format.symmetric else minimum[..., None])
    found = format.decode(parts)
    assert found.shape == x.shape
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - expected.reshape(x.shape)).max() < 1e-5


@pytest.mark.parametrize(("format", "judge"), [(Int8KV(group_size=32), Q.Q8_0), (Int4KV(), Q.Q4_1)], ids=str)
def test_parameters_are_those_of_gguf_and_codes_no_worse(format: IntegerKV, judge: Q) -> None:
    x = keys_like()
    parts = format.encode(x)
    theirs = gguf.quants.quantize(x.numpy(), judge)
    fields = theirs.reshape(*x.shape[:2], 2, -1)
    at = fields[..., : 4 if judge == Q.Q4_1 else 2].copy().view(np.float16)
    assert np.array_equal(parts["scale"].numpy(), at[..., 0])
    if judge == Q.Q4_1:
        assert np.array_equal(parts["minimum"].numpy(), at[..., 1])
    decoded = gguf.quants.dequantize(theirs, judge).reshape(x.shape)
    ours = (format.decode(parts) - x).square().sum()
    assert ours <= np.square(decoded - x.numpy()).sum() * (1 + 1e-6)


@pytest.mark.trap(30)
@pytest.mark.parametrize("name", ["random", "edges"])
def test_fp8_codes_are_those_of_compressed_tensors_at_its_scale(name: str) -> None:
    """Its scale of a whole tensor is the one of ours that belongs to the tensor's largest magnitude."""
    judge = golden("compressed_tensors")
    x = judge[name].float().view(len(judge[name]), 2, -1)  # tokens, heads, channels
    scale = FP8KV().scale(float(x.abs().max()))
    assert scale == judge[f"fp8-tensor-{name}.scale"].item()
    parts = FP8KV().encode(x, scale)
    theirs = judge[f"fp8-tensor-{name}.codes"].view(torch.uint8).view(parts["codes"].shape)
    zeros = (parts["codes"] & 127 == 0) & (theirs & 127 == 0)
    assert bool(((parts["codes"] == theirs) | zeros).all())
    exact = theirs.view(torch.float8_e4m3fn).double() * scale
    assert torch.allclose(FP8KV().decode(parts, scale).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.trap(30)
def test_the_fp8_scale_is_amax_over_448() -> None:
    assert FP8KV().scale(448.0) == 1.0
    assert FP8KV().scale(896.0) == 2.0
    assert FP8KV().scale(3.0) == float(np.float32(3) / np.float32(448))
    x = torch.tensor([-3.0, 3.0, 1.5, 30.0, -1000.0]).view(1, 1, 5)
    decoded = FP8KV().decode(FP8KV().encode(x, FP8KV().scale(3.0)), FP8KV().scale(3.0))
    assert decoded.flatten().tolist() == pytest.approx([-3.0, 3.0, 1.5, 3.0, -3.0])  # beyond amax: saturated


@pytest.mark.trap(30)
@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf"), float("-inf")])
def test_no_scale_is_made_up(amax: float) -> None:
    with pytest.raises(QbenchError, match="needs a finite one above 0"):
        FP8KV().scale(amax)


@pytest.mark.trap(30)
def test_fp8_is_refused_without_a_scale_for_each_layer() -> None:
    with pytest.raises(QbenchError, match="fp8: 0 of 3 layers have calibrated scales"):
        KVCache(FP8KV()).check(num_layers=3, head_dim=64)
    with pytest.raises(QbenchError, match="fp8: 2 of 3 layers"):
        KVCache(FP8KV(), ((1.0, 2.0),) * 2).check(num_layers=3, head_dim=64)
    KVCache(FP8KV(), ((1.0, 2.0),) * 3).check(num_layers=3, head_dim=64)
    KVCache(Int8KV()).check(num_layers=3, head_dim=64)


@pytest.mark.trap(27)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_zeros_and_empty_pages_are_exact_zeros(format: KVFormat) -> None:
    scale = 0.5 if format.calibrated else None
    x = torch.zeros(2, 3, 32)
    parts = format.encode(x, scale)
    assert torch.equal(format.decode(parts, scale), x)
    empty = {name: torch.zeros_like(part) for name, part in parts.items()}
    assert torch.equal(format.decode(empty, scale), x)


@pytest.mark.parametrize("format", INTEGERS, ids=repr)
@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-5, 6e4])
def test_tiny_huge_and_constant_groups_stay_finite(format: IntegerKV, size: float) -> None:
    """Up to where float16 ends; below its smallest value a scale is rounded to a multiple of it."""
    x = keys_like(4, 2, 64) * size / 40
    x[0, 0] = size / 40
    decoded = format.decode(format.encode(x))
    assert bool(torch.isfinite(decoded).all())
    step = float(x.max() - x.min()) / (2**format.bits - 2) + 2**format.bits * 2**-25
    assert (decoded - x).abs().max() <= 1.2 * step + 1e-3 * float(x.abs().max())


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_each_token_stands_by_itself(format: KVFormat) -> None:
    scale = 0.1 if format.calibrated else None
    x = keys_like()
    together = format.encode(x, scale)
    for token in (0, 7, 19):
        alone = format.encode(x[token : token + 1], scale)
        assert all(torch.equal(alone[name][0], together[name][token]) for name in together)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_values_of_16_bits_are_rounded_as_their_float32(format: KVFormat) -> None:
    scale = 0.1 if format.calibrated else None
    x = keys_like().bfloat16()
    ours, theirs = format.encode(x, scale), format.encode(x.float(), scale)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_bytes_of_a_token() -> None:
    values = 2 * 3 * 64  # keys and values, heads, channels
    assert FP8KV().token_bytes(3, 64) == values
    assert Int8KV().token_bytes(3, 64) == values + 2 * 3 * 2  # a scale a head
    assert Int4KV().token_bytes(3, 64) == values // 2 + 2 * 3 * 2 * 4  # two groups a head, scale and minimum
    assert Int4KV(group_size=64, symmetric=True).token_bytes(3, 64) == values // 2 + 2 * 3 * 2


def test_groups_that_do_not_divide_the_head_are_refused() -> None:
    with pytest.raises(QbenchError, match="int4: group_size is 32, heads have 80 channels; allowed: 2, 4, 5, 8, 10,"):
        Int4KV().check(80)
    with pytest.raises(QbenchError, match="int8: group_size is 64, heads have 32 channels"):
        Int8KV(group_size=64).check(32)
    with pytest.raises(QbenchError, match="int8: group_size is 0; allowed: 2 or more"):
        kv_format_from_dict({"name": "int8", "group_size": 0})
    Int8KV().check(80)
    FP8KV().check(80)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_plain_values_and_back(format: KVFormat) -> None:
    scales = ((0.1, 2.5), (0.3, 1e-9)) if format.calibrated else ()
    cache = KVCache(format, scales)
    assert KVCache.from_dict(json.loads(json.dumps(cache.to_dict()))) == cache
    assert type(format) is KV_FORMATS.get(format.name)


@pytest.mark.trap(30)
@pytest.mark.parametrize("scales", [{"1": [1.0, 1.0]}, {"0": [1.0]}, {"0": [0.0, 1.0]}, {"0": [1.0, None]}])
def test_damaged_scales_name_their_layer(scales: dict[str, list[float]]) -> None:
    with pytest.raises(QbenchError, match="the scales of layer 0 are"):
        KVCache.from_dict({"format": {"name": "fp8"}, "scales": scales})
