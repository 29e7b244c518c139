"""GGUF's K-quants: super-blocks of 256 weights whose sub-blocks' scales are themselves quantized.

    Q2_K: 16 x 16, 4-bit scales and minimums, d, dmin   value = d * s * q - dmin * m      84 bytes   2.625 bits
    Q3_K: 16 x 16, 6-bit signed scales, d               value = d * (s - 32) * (q - 4)   110 bytes   3.4375 bits
    Q4_K:  8 x 32, 6-bit scales and minimums, d, dmin   value = d * s * q - dmin * m     144 bytes   4.5 bits
    Q5_K:  8 x 32, the same                             value = d * s * q - dmin * m     176 bytes   5.5 bits
    Q6_K: 16 x 16, 8-bit signed scales, d               value = d * s * (q - 32)         210 bytes   6.5625 bits

First each sub-block's best scale (and minimum) is searched, then those are quantized, then the codes are chosen again
with what the quantized scales stand for. Without importance a weight's error counts by its own size; with importance
by ``importance * sqrt(sigma^2 + x^2)``, and the scales of the sub-blocks are searched as well. Rows must be a multiple
of 256 long; `for_width` names the type that llama.cpp takes instead.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import FORMATS, Format, Params
from qbench.formats.gguf_blocks import GGUFBlocks
from qbench.formats.gguf_bytes import (
    as_half,
    half_bytes,
    half_field,
    pack_planes,
    pack_scales,
    pack_scales_and_mins,
    unpack_planes,
    unpack_scales,
    unpack_scales_and_mins,
)
from qbench.formats.gguf_search import (
    ZERO,
    affine,
    divided,
    extreme,
    ordered_sum,
    root,
    signed_descent,
    symmetric,
    unsigned,
)
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


class KQuant(GGUFBlocks):
    """`sub` neighbouring columns share a scale."""

    columns: ClassVar[int] = 256
    sub: ClassVar[int]
    instead: ClassVar[str]  # the format for rows that are no multiple of 256

    def for_width(self, in_features: int) -> Format | None:
        if in_features % self.columns == 0:
            return self
        other: Format = FORMATS.get(self.instead)()
        return other.for_width(in_features)

    @abstractmethod
    def fields(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        """Of blocks of bytes ``[..., nbytes]``: codes ``[..., 256]``, and the scales as they are stored: float32 `d`
        (and `dmin`) ``[..., 1]``, integer `scales` (and `mins`) ``[..., k]``."""

    def _subblocks(self, x: torch.Tensor) -> torch.Tensor:
        """``[256, blocks]`` as ``[sub, sub-blocks * blocks]``."""
        return x.reshape(-1, self.sub, x.shape[1]).transpose(0, 1).flatten(1)

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        """A value a sub-block, ``[sub-blocks * blocks]``, as ``[sub-blocks, blocks]``."""
        return values.reshape(self.columns // self.sub, -1)

    def _weights(self, x: torch.Tensor, importance: torch.Tensor, factor: float) -> torch.Tensor:
        """``importance * sqrt(sigma^2 + x^2)`` with sigma^2 = `factor` times the super-block's mean square."""
        sigma2 = factor * ordered_sum(x * x) / self.columns
        return self._subblocks(importance * root(sigma2 + x * x))

    def _each(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """A value a sub-block ``[out, n]`` for columns ``start..stop``: ``[out, stop - start]`` or ``[out, 1]``."""
        first, last = start // self.sub, (stop - 1) // self.sub + 1
        if last - first == 1:
            return values[:, first:last]
        return values[:, first:last].repeat_interleave(self.sub, 1)[:, start - first * self.sub :][:, : stop - start]


class _Affine(KQuant):
    """``d * scale * code - dmin * min``."""

    top_scale: ClassVar[int]
    plain_search: ClassVar[tuple[float, float, int]]  # start, step, count without importance
    sigma_factor: ClassVar[float] = 2.0

    @property
    def holds_zero(self) -> bool:
        return False

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def _plain_weights(self, x: torch.Tensor) -> torch.Tensor:
        return root(ordered_sum(x * x) / self.sub) + x.abs()

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        subs = self._subblocks(x)
        if importance is None:
            absolute = self.bits == 2
            found = affine(subs, self.top, self._plain_weights(subs), *self.plain_search, absolute=absolute)
            (d, scales), (dmin, mins) = (self._by_largest(self._by_block(v)) for v in (found[0], -found[1]))
        else:
            weights = self._weights(x, importance, self.sigma_factor)
            found = affine(subs, self.top, weights, -0.9, 0.05, 36)
            total = self._by_block(ordered_sum(weights))
            (d, scales), (dmin, mins) = (
                unsigned(self._by_block(v), self.top_scale, total) for v in (found[0], -found[1])
            )
        return {"d": as_half(d.unsqueeze(0)), "scales": scales, "dmin": as_half(dmin.unsqueeze(0)), "mins": mins}

    def _by_largest(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest value has the largest code."""
        largest = values.amax(0).clamp_(min=0)
        inverse = torch.where(largest > 0, divided(self.top_scale, largest), 0.0)
        return largest / self.top_scale, (inverse * values).round_().clamp_(0, self.top_scale)

    def spread(self, params: Params, start: int, stop: int) -> Params:
        return {
            "scale": self._each(params["d"] * params["scales"], start, stop),
            "minimum": self._each(params["dmin"] * params["mins"], start, stop),
        }

    def from_bytes(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        codes, found = self.fields(blocks)
        scale, minimum = found["d"] * found["scales"].float(), found["dmin"] * found["mins"].float()
        return codes, {"scale": scale, "minimum": minimum}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        scale = params["scale"]
        steps = ((columns + params["minimum"]) / scale).round_().clamp_(0, self.top)
        return steps.masked_fill_(scale == 0, 0).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return params["scale"] * codes.float() - params["minimum"]


class _Symmetric(KQuant):
    """``d * scale * (code - half)``. A sub-block without a scale has code 0 everywhere."""

    sub: ClassVar[int] = 16

    @property
    def half(self) -> int:
        return 1 << (self.bits - 1)

    def spread(self, params: Params, start: int, stop: int) -> Params:
        return {"scale": self._each(params["d"] * params["scales"], start, stop)}

    def from_bytes(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        codes, found = self.fields(blocks)
        return codes, {"scale": found["d"] * found["scales"].float()}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        scale = params["scale"]
        steps = (columns / scale).round_().clamp_(-self.half, self.half - 1).add_(self.half)
        return steps.masked_fill_(scale == 0, 0).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return params["scale"] * (codes.float() - self.half)


@dataclass(frozen=True)
class Q2_K(_Affine):  # noqa: N801
    """2-bit codes over a minimum. Without importance, errors are compared by magnitude."""

    name: ClassVar[str] = "q2_k"
    kind: ClassVar[str] = "Q2_K"
    instead: ClassVar[str] = "q4_0"
    nbytes: ClassVar[int] = 84
    sub: ClassVar[int] = 16
    bits: ClassVar[int] = 2
    top_scale: ClassVar[int] = 15
    plain_search: ClassVar[tuple[float, float, int]] = (-0.5, 0.1, 15)
    sigma_factor: ClassVar[float] = 1.0

    def _plain_weights(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        scales = params["scales"].byte() | (params["mins"].byte() << 4)
        return torch.cat([scales, pack_planes(codes, 2, 32), half_bytes(params["d"]), half_bytes(params["dmin"])], -1)

    def fields(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        scales, mins = blocks[..., :16] & 15, blocks[..., :16] >> 4
        d, dmin = half_field(blocks, 80), half_field(blocks, 82)
        return unpack_planes(blocks[..., 16:80], 2, 32), {"d": d, "scales": scales, "dmin": dmin, "mins": mins}


class _SixBitScales(_Affine):
    """Q4_K and Q5_K: 8 sub-blocks of 32; the upper bits of Q5_K's codes lie before their nibbles."""

    sub: ClassVar[int] = 32
    top_scale: ClassVar[int] = 63

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        fields = [half_bytes(params["d"]), half_bytes(params["dmin"])]
        fields.append(pack_scales_and_mins(params["scales"].byte(), params["mins"].byte()))
        if self.bits == 5:
            fields.append(pack_planes(codes >> 4, 1, 32))
        return torch.cat([*fields, pack_planes(codes & 15, 4, 32)], -1)

    def fields(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        scales, mins = unpack_scales_and_mins(blocks[..., 4:16])
        codes = unpack_planes(blocks[..., -128:], 4, 32)
        if self.bits == 5:
            codes = codes | (unpack_planes(blocks[..., 16:48], 1, 32) << 4)
        return codes, {"d": half_field(blocks, 0), "scales": scales, "dmin": half_field(blocks, 2), "mins": mins}


@dataclass(frozen=True)
class Q4_K(_SixBitScales):  # noqa: N801
    """4-bit codes over a minimum."""

    name: ClassVar[str] = "q4_k"
    kind: ClassVar[str] = "Q4_K"
    instead: ClassVar[str] = "q5_0"
    nbytes: ClassVar[int] = 144
    bits: ClassVar[int] = 4
    plain_search: ClassVar[tuple[float, float, int]] = (-1.0, 0.1, 20)


@dataclass(frozen=True)
class Q5_K(_SixBitScales):  # noqa: N801
    """5-bit codes over a minimum."""

    name: ClassVar[str] = "q5_k"
    kind: ClassVar[str] = "Q5_K"
    instead: ClassVar[str] = "q5_1"
    nbytes: ClassVar[int] = 176
    bits: ClassVar[int] = 5
    plain_search: ClassVar[tuple[float, float, int]] = (-0.5, 0.1, 15)


@dataclass(frozen=True)
class Q3_K(_Symmetric):  # noqa: N801
    """3-bit codes around 4. The upper bits of all 256 codes come first."""

    name: ClassVar[str] = "q3_k"
    kind: ClassVar[str] = "Q3_K"
    instead: ClassVar[str] = "q4_0"
    nbytes: ClassVar[int] = 110
    bits: ClassVar[int] = 3

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        if importance is None:
            values = self._by_block(signed_descent(self._subblocks(x), 4))
            far = extreme(values)
            inverse = torch.where(far == 0, 0.0, divided(-32, far))
            d = torch.where(far == 0, 0.0, 1 / inverse)
        else:
            weights = self._weights(x, importance, 2.0)
            values = self._by_block(symmetric(self._subblocks(x), 4, weights)[0])
            d, inverse = symmetric(values, 32, self._by_block(ordered_sum(weights)))
        return {"d": as_half(d.unsqueeze(0)), "scales": (inverse * values).round_().clamp_(-32, 31)}

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        fields = [pack_planes(codes >> 2, 1, 32), pack_planes(codes & 3, 2, 32)]
        return torch.cat([*fields, pack_scales((params["scales"] + 32).byte()), half_bytes(params["d"])], -1)

    def fields(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        codes = unpack_planes(blocks[..., 32:96], 2, 32) | (unpack_planes(blocks[..., :32], 1, 32) << 2)
        scales = unpack_scales(blocks[..., 96:108]).to(torch.int8) - 32
        return codes, {"d": half_field(blocks, 108), "scales": scales}


@dataclass(frozen=True)
class Q6_K(_Symmetric):  # noqa: N801
    """6-bit codes around 32. Importance weighs errors as it is, without the weight's size."""

    name: ClassVar[str] = "q6_k"
    kind: ClassVar[str] = "Q6_K"
    instead: ClassVar[str] = "q8_0"
    nbytes: ClassVar[int] = 210
    bits: ClassVar[int] = 6

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        weights = x * x if importance is None else importance.expand_as(x)
        values = self._by_block(symmetric(self._subblocks(x), 32, self._subblocks(weights))[0])
        far = extreme(values)
        zero = far.abs() < ZERO
        inverse = divided(-128, far)
        return {
            "d": as_half((1 / inverse).masked_fill(zero, 0).unsqueeze(0)),
            "scales": (inverse * values).round_().clamp_(-128, 127).masked_fill(zero, 0),
        }

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        fields = [pack_planes(codes & 15, 4, 64), pack_planes(codes >> 4, 2, 32)]
        scales = params["scales"].to(torch.int8).contiguous().view(torch.uint8)
        return torch.cat([*fields, scales, half_bytes(params["d"])], -1)

    def fields(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        codes = unpack_planes(blocks[..., :128], 4, 64) | (unpack_planes(blocks[..., 128:192], 2, 32) << 4)
        scales = blocks[..., 192:208].contiguous().view(torch.int8)
        return codes, {"d": half_field(blocks, 208), "scales": scales}
