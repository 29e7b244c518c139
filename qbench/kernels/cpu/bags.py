"""Products with 2, 4 and 8-bit integer weights on a processor, float32 activations, no decoded weight in memory.

PyTorch's quantized embedding bag adds up table rows, each times a float32 factor, and decodes rows in registers. With a
row for each input column, the column's activation as factor and a bag for each group, that is a matrix-vector
product: the bag sums ``x[i] * (code[o, i] - middle)`` over the group's columns, and the group's scale (and zero point)
are applied to the sums. Many rows of `x` are multiplied densely instead, with rows decoded by the same operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from qbench.formats.base import QuantizedTensor
from qbench.formats.bitpack import pack_bits, unpack_bits
from qbench.formats.integer import Integer

MAX_BAG_ROWS = 6  # from here on decoding once and multiplying densely is faster
CHANNEL_SPLITS = 4  # bags of a weight without groups, so that threads share the work

_BAGS = {
    2: torch.ops.quantized.embedding_bag_2bit_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
}


def supports(weight: QuantizedTensor) -> bool:
    return (
        isinstance(weight.format, Integer)
        and weight.format.bits in _BAGS
        and weight.shape[0] * weight.format.bits % 8 == 0
    )


@dataclass(frozen=True)
class BagWeight:
    """An integer weight stored by input column: same bytes as its `QuantizedTensor` plus 4 or 8 a column."""

    shape: tuple[int, int]  # [out, in]
    bits: int
    rows: torch.Tensor  # uint8 [in, out * bits / 8 + 4 or 8]: codes, then scale 1 and bias -middle; groups in order
    scale: torch.Tensor  # [groups, out] as stored; float32 [1, out] or [1, 1] without groups
    zero: torch.Tensor | None  # [groups, out] or [1, 1]: int8 zero point minus middle, or float zero point as stored
    order: torch.Tensor | None  # int32 [in]: the column each row is of, when act-order mixed them
    group_of_row: torch.Tensor  # int32 [in]
    even_groups: bool  # all groups are of one size
    bag_starts: torch.Tensor  # int32 [bags]

    @classmethod
    def repack(cls, weight: QuantizedTensor) -> BagWeight:
        assert isinstance(weight.format, Integer)
        (out, width), bits, parts = weight.shape, weight.format.bits, weight.parts
        groups = weight.format.blocks(width)
        order = None
        group_of_row = torch.arange(width, dtype=torch.int32) // weight.format.block_size(width)
        if "g_idx" in parts:
            group_of_row, order = torch.sort(parts["g_idx"], stable=True)
        codes = unpack_bits(parts["codes"], bits, width).T
        if order is not None:
            codes = codes[order]
        affine = torch.tensor([1, -weight.format.middle], dtype=torch.float32 if bits == 8 else torch.float16)
        rows = torch.cat((pack_bits(codes.contiguous(), bits), affine.view(torch.uint8).expand(width, -1)), 1)
        zero = parts.get("zero_point")
        if zero is not None:
            zero = zero.T.contiguous()
            if zero.dtype == torch.uint8:
                zero = (zero.to(torch.int16) - weight.format.middle).to(torch.int8)
        counts = torch.bincount(group_of_row, minlength=groups)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]))
        if groups == 1:
            starts = torch.arange(0, width, -(-width // CHANNEL_SPLITS))
        return cls(
            shape=(out, width),
            bits=bits,
            rows=rows,
            scale=(parts["scale"].float() if groups == 1 else parts["scale"]).T.contiguous(),
            zero=zero,
            order=None if order is None else order.int(),
            group_of_row=group_of_row,
            even_groups=bool((counts == counts[0]).all()),
            bag_starts=starts.int(),
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.rows, self.scale, self.zero, self.order, self.group_of_row, self.bag_starts)
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def offset(self) -> torch.Tensor | None:
        """The zero point minus the middle code, int8 or float32."""
        if self.zero is None or self.zero.dtype == torch.int8:
            return self.zero
        return self.zero.float() - (1 << (self.bits - 1))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
        y = x.float()
        if self.order is not None:
            y = y.index_select(1, self.order)
        y = self._bag_product(y) if self.uses_bags(x) else self._dense_product(y)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def uses_bags(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_BAG_ROWS

    def _bag_product(self, x: torch.Tensor) -> torch.Tensor:
        n, width = x.shape
        starts = self.bag_starts
        if n > 1:
            starts = (starts + torch.arange(0, n * width, width, dtype=torch.int32).unsqueeze(1)).view(-1)
        sums = self._bags(_columns(width, n), starts, x.reshape(-1)).view(n, -1, self.shape[0])
        scale, offset = self.scale.float(), self.offset
        if len(scale) == 1:
            y = sums.sum(1)
            if offset is not None:
                y -= x.sum(1, keepdim=True) * offset
            return y.mul_(scale)
        y = sums.mul_(scale).sum(1)
        if offset is not None:
            y -= self._group_sums(x) @ (scale * offset)
        return y

    def _group_sums(self, x: torch.Tensor) -> torch.Tensor:
        n, groups = len(x), len(self.scale)
        if self.even_groups:
            return x.view(n, groups, -1).sum(2)
        return x.new_zeros(n, groups).index_add_(1, self.group_of_row, x)

    def _bags(self, columns: torch.Tensor, starts: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Float32 sums ``[bags, out]`` of decoded rows, each times its factor; a bag goes up to the next start."""
        sums: torch.Tensor = _BAGS[self.bits](self.rows, columns, starts, False, 0, False, factors, None, False)
        return sums

    def _dense_product(self, x: torch.Tensor) -> torch.Tensor:
        columns = _columns(self.shape[1], 1)
        w = self._bags(columns, columns, None)  # code - middle, [in, out]
        scale, offset = self.scale.float(), self.offset
        groups, width = len(scale), self.shape[1]
        if groups == 1:
            if offset is not None:
                w -= offset
            return (x @ w).mul_(scale)
        if self.even_groups:
            grouped = w.view(groups, width // groups, -1)
            if offset is not None:
                grouped -= offset.unsqueeze(1)
            grouped *= scale.unsqueeze(1)
        else:
            if offset is not None:
                w -= offset.index_select(0, self.group_of_row)
            w *= scale.index_select(0, self.group_of_row)
        return x @ w


@lru_cache(maxsize=256)
def _columns(width: int, repeats: int) -> torch.Tensor:
    return torch.arange(width, dtype=torch.int32).repeat(repeats)
