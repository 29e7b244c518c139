"""GGUF's block types of 32 weights, with a float16 scale in front, and what all its block types have in common.

    Q8_0: d, 32 int8                       value = d * q              34 bytes
    Q4_0: d, 32 nibbles                    value = d * (q - 8)        18 bytes
    Q4_1: d, m, 32 nibbles                 value = d * q + m          20 bytes
    Q5_0: d, 32 upper bits, 32 nibbles     value = d * (q - 16)       22 bytes
    Q5_1: d, m, 32 upper bits, 32 nibbles  value = d * q + m          24 bytes

A nibble byte holds element i low and element i + 16 high. Stored is one uint8 tensor ``blocks`` ``[out, bytes a row]``,
the bytes of a GGUF file. They agree with llama.cpp's quantizers, with and without importance. Codes are chosen with the
scale before it was rounded to float16, as llama.cpp does: its ``inverse``, halves upwards, or with importance the
``searched_inverse``, halves to even.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, Format, Params, QuantizedTensor
from qbench.formats.gguf_bytes import as_half, half_bytes, half_field, pack_planes, unpack_planes
from qbench.formats.gguf_search import affine, extreme, ordered_sum, root, symmetric
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

BLOCK = 32
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # registered in lower case
CHUNK = 1 << 19  # weights that a search works on at a time, so that its temporaries stay in the processor's cache


class GGUFBlocks(Format):
    """A GGUF block type: `columns` weights in `nbytes` bytes. Columns of a block are always neighbours."""

    kind: ClassVar[str]  # ggml's name
    bits: ClassVar[int]  # of a code
    columns: ClassVar[int] = BLOCK
    nbytes: ClassVar[int]
    weighs_importance: ClassVar[bool] = True  # type: ignore[misc]
    any_order: ClassVar[bool] = False

    def for_width(self, in_features: int) -> Format | None:
        return None if in_features % self.columns else self

    def block_size(self, in_features: int) -> int:
        if in_features % self.columns:
            raise QbenchError(f"format {self.name}: rows of {in_features} are no multiple of {self.columns}.")
        return self.columns

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        rows = max(CHUNK // self.columns, 1)
        given = dict(shared) if importance is None else {**shared, "importance": importance}
        found = []
        for start in range(0, columns.shape[0], rows):
            part = {k: (v if v.shape[0] == 1 else v[start : start + rows]).T for k, v in given.items()}
            x = columns[start : start + rows].T.contiguous()
            found.append(self.search(x, part.pop("importance", None), part))
        return {k: torch.cat([params[k] for params in found], 1).T for k in found[0]}

    @abstractmethod
    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        """`fit` for thousands of blocks: `x` and `importance` ``[columns, blocks]``, each result ``[k, blocks]``."""

    @abstractmethod
    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        """Codes ``[..., columns]`` and fitted parameters ``[..., k]`` as uint8 ``[..., nbytes]``."""

    @abstractmethod
    def from_bytes(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        """The inverse: codes, and what `decode` needs, ``[..., k]`` for k runs of columns each."""

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        assert g_idx is None, "columns of a GGUF block are neighbours"
        rows, width = codes.shape
        count = width // self.columns
        data = self.to_bytes(
            codes.reshape(rows, count, self.columns), {k: v.reshape(rows, count, -1) for k, v in params.items()}
        )
        return QuantizedTensor(self, (rows, width), {"blocks": data.flatten(1).contiguous()})

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        codes, params = self.from_bytes(parts["blocks"].reshape(shape[0], -1, self.nbytes))
        runs = {k: v.flatten(1).repeat_interleave(self.columns // v.shape[-1], 1) for k, v in params.items()}
        return codes.flatten(1), runs


def encode(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a float32 `weight` ``[rows, in]`` in ggml's type `kind`: uint8 ``[rows, bytes a row]``."""
    format: Format = FORMATS.get(kind.lower())()
    return format.quantize(weight).parts["blocks"]


def decode(kind: str, data: torch.Tensor) -> torch.Tensor:
    """The float32 ``[rows, in]`` that `data` (uint8 ``[rows, bytes a row]``) of ggml's type `kind` stands for."""
    format: GGUFBlocks = FORMATS.get(kind.lower())()
    width = data.shape[1] // format.nbytes * format.columns
    return QuantizedTensor(format, (data.shape[0], width), {"blocks": data}).dequantize()


def round_half_away(values: torch.Tensor) -> torch.Tensor:
    """C's ``roundf``: halves away from zero, and the float just below 0.5 still to 0."""
    size = values.abs()
    whole = size.floor()
    return torch.copysign(whole + (2 * (size - whole)).floor(), values)


def assemble(codes: torch.Tensor, *head: torch.Tensor) -> torch.Tensor:
    """Blocks from `codes` (int8 for Q8_0, uint8 nibble values for Q4) ``[rows, in]`` and float16 `head` values
    ``[rows, in / 32]`` (the scale, then Q4_1's minimum): uint8 ``[rows, bytes a row]``."""
    blocks = codes.reshape(codes.shape[0], -1, BLOCK)
    body = pack_planes(blocks, 4, 16) if codes.dtype == torch.uint8 else blocks.contiguous().view(torch.uint8)
    return torch.cat([*(half_bytes(value.unsqueeze(-1)) for value in head), body], -1).flatten(1)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


@dataclass(frozen=True)
class Q8_0(GGUFBlocks):  # noqa: N801
    """8-bit codes; the largest magnitude becomes 127. 8.5 bits a weight."""

    name: ClassVar[str] = "q8_0"
    kind: ClassVar[str] = "Q8_0"
    nbytes: ClassVar[int] = 34
    bits: ClassVar[int] = 8

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        scale = x.abs().amax(0, keepdim=True) / 127
        return {"scale": as_half(scale), "inverse": _inverse(scale)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return round_half_away(columns * params["inverse"]).clamp_(-128, 127).to(torch.int8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return params["scale"] * codes.float()

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return torch.cat([half_bytes(params["scale"]), codes.contiguous().view(torch.uint8)], -1)

    def from_bytes(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        return blocks[..., 2:].contiguous().view(torch.int8), {"scale": half_field(blocks, 0)}


class _Nibbles(GGUFBlocks):
    """4 or 5 bits: nibbles, and before them the upper bits. With importance, llama.cpp weighs a column's error by
    ``importance * sqrt(mean of the row's squares + x * x)``."""

    head: ClassVar[tuple[str, ...]]  # the float16 fields

    def shared(self, weight: torch.Tensor) -> Params:
        return {"mean_square": (ordered_sum(weight.T.square()) / weight.shape[1]).unsqueeze(1)}

    def _weights(self, x: torch.Tensor, importance: torch.Tensor, shared: Params) -> torch.Tensor:
        return importance * root(shared["mean_square"] + x * x)

    def to_bytes(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        fields = [half_bytes(params[key]) for key in self.head]
        if self.bits == 5:
            fields.append(pack_planes(codes >> 4, 1, 1))
        return torch.cat([*fields, pack_planes(codes & 15, 4, 16)], -1)

    def from_bytes(self, blocks: torch.Tensor) -> tuple[torch.Tensor, Params]:
        params = {key: half_field(blocks, 2 * i) for i, key in enumerate(self.head)}
        codes = unpack_planes(blocks[..., self.nbytes - 16 :], 4, 16)
        if self.bits == 5:
            upper = blocks[..., self.nbytes - 20 : self.nbytes - 16]
            codes = codes | (unpack_planes(upper, 1, 1) << 4)
        return codes, params


class _Symmetric(_Nibbles):
    """``scale * (code - half)``; the extreme value, with its sign, has code 0."""

    head: ClassVar[tuple[str, ...]] = ("scale",)

    @property
    def half(self) -> int:
        return 1 << (self.bits - 1)

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        if importance is None:
            scale = extreme(x).unsqueeze(0) / -self.half
            return {"scale": as_half(scale), "inverse": _inverse(scale)}
        scale, inverse = symmetric(x, self.half, self._weights(x, importance, shared))
        return {"scale": as_half(scale.unsqueeze(0)), "searched_inverse": inverse.unsqueeze(0)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        if "inverse" in params:
            steps = (columns * params["inverse"] + (self.half + 0.5)).trunc_()
        else:
            inverse = params["searched_inverse"]
            steps = (columns * inverse).round_().add_(self.half).masked_fill_(inverse == 0, 0)
        return steps.clamp_(0, 2 * self.half - 1).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return params["scale"] * (codes.float() - self.half)


class _Affine(_Nibbles):
    """``scale * code + minimum``; without importance the range is the block's."""

    head: ClassVar[tuple[str, ...]] = ("scale", "minimum")

    @property
    def holds_zero(self) -> bool:
        return False

    def search(self, x: torch.Tensor, importance: torch.Tensor | None, shared: Params) -> Params:
        top = (1 << self.bits) - 1
        if importance is None:
            low = x.amin(0, keepdim=True)
            scale = (x.amax(0, keepdim=True) - low) / top
            return {"scale": as_half(scale), "minimum": as_half(low), "inverse": _inverse(scale), "origin": low}
        weights = self._weights(x, importance, shared)
        scale, minimum, inverse, origin = (v.unsqueeze(0) for v in affine(x, top, weights, -0.9, 0.05, 36))
        return {"scale": as_half(scale), "minimum": as_half(minimum), "searched_inverse": inverse, "origin": origin}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        above = columns - params["origin"]
        if "inverse" in params:
            steps = (above * params["inverse"] + 0.5).trunc_()
        else:
            steps = (above * params["searched_inverse"]).round_()
        return steps.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return params["scale"] * codes.float() + params["minimum"]


@dataclass(frozen=True)
class Q4_0(_Symmetric):  # noqa: N801
    """4-bit codes around 8. 4.5 bits a weight."""

    name: ClassVar[str] = "q4_0"
    kind: ClassVar[str] = "Q4_0"
    nbytes: ClassVar[int] = 18
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Q5_0(_Symmetric):  # noqa: N801
    """5-bit codes around 16. 5.5 bits a weight."""

    name: ClassVar[str] = "q5_0"
    kind: ClassVar[str] = "Q5_0"
    nbytes: ClassVar[int] = 22
    bits: ClassVar[int] = 5


@dataclass(frozen=True)
class Q4_1(_Affine):  # noqa: N801
    """4-bit codes over a minimum. 5 bits a weight."""

    name: ClassVar[str] = "q4_1"
    kind: ClassVar[str] = "Q4_1"
    nbytes: ClassVar[int] = 20
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Q5_1(_Affine):  # noqa: N801
    """5-bit codes over a minimum. 6 bits a weight."""

    name: ClassVar[str] = "q5_1"
    kind: ClassVar[str] = "Q5_1"
    nbytes: ClassVar[int] = 24
    bits: ClassVar[int] = 5
