"""Products with 2, 4 and 8-bit integer weights on a processor, float32 activations, no decoded weight in memory.

A bag for each group (see `tables`) sums ``x[i] * (code[o, i] - middle)`` over the group's columns; the group's scale
and zero point are applied to the sums. Many rows of `x` are multiplied densely, with a few columns decoded at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qbench.formats.base import QuantizedTensor
from qbench.formats.bitpack import unpack_bits
from qbench.formats.integer import Integer
from qbench.kernels.cpu.tables import DENSE_CHUNK, MAX_BAG_ROWS, TABLE_BITS, bag_sums, bag_table, counted, spans

CHANNEL_SPLITS = 4  # bags of a weight without groups, so that threads share the work


def supports(weight: QuantizedTensor) -> bool:
    return (
        isinstance(weight.format, Integer)
        and weight.format.bits in TABLE_BITS
        and weight.shape[0] * weight.format.bits % 8 == 0
    )


@dataclass(frozen=True)
class BagWeight:
    """An integer weight stored by input column: same bytes as its `QuantizedTensor` plus 4 or 8 a column."""

    shape: tuple[int, int]  # [out, in]
    bits: int
    rows: torch.Tensor  # the `bag_table` of code - middle, groups in order
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
        rows = bag_table(codes, bits, 1, -weight.format.middle)
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

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
        rows = x.float()
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        scale = self.scale.float()
        y = self._bag_product(rows, scale) if self.uses_bags(x) else self._dense_product(rows, scale)
        if self.zero is not None:
            offset = self.zero.float()  # zero point minus middle code
            if self.zero.dtype != torch.int8:
                offset = offset - (1 << (self.bits - 1))
            y -= self._group_sums(rows) @ (offset if len(scale) == 1 else scale * offset)
        if len(scale) == 1:
            y *= scale
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def uses_bags(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_BAG_ROWS

    def _bag_product(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Products with ``code - middle``, scaled if there are groups."""
        n, width = x.shape
        starts = self.bag_starts
        if n > 1:
            starts = (starts + torch.arange(0, n * width, width, dtype=torch.int32).unsqueeze(1)).view(-1)
        sums = bag_sums(self.rows, self.bits, counted(width, n), starts, x.reshape(-1)).view(n, -1, self.shape[0])
        return sums.sum(1) if len(scale) == 1 else sums.mul_(scale).sum(1)

    def _dense_product(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The same for many rows."""
        (out, width), groups = self.shape, len(scale)
        y = x.new_zeros(len(x), out)
        size = width // groups if self.even_groups and groups > 1 else 1
        for start, stop in spans(width, DENSE_CHUNK // out, size):
            columns = counted(stop - start)
            w = bag_sums(self.rows[start:stop], self.bits, columns, columns, None)  # [columns, out]
            if size > 1:
                w.view(-1, size, out).mul_(scale[start // size : stop // size].unsqueeze(1))
            elif groups > 1:
                w *= scale.index_select(0, self.group_of_row[start:stop])
            y.addmm_(x[:, start:stop], w)
        return y

    def _group_sums(self, x: torch.Tensor) -> torch.Tensor:
        n, groups = len(x), len(self.scale)
        if self.even_groups:
            return x.view(n, groups, -1).sum(2)
        return x.new_zeros(n, groups).index_add_(1, self.group_of_row, x)
