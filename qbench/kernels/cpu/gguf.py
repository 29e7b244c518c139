"""Products with GGUF's block types on a processor, float32 activations, no decoded weight in memory.

Every type is affine within its sub-blocks, so a product is ``scale * sum(x * code) + minimum * sum(x)`` a sub-block.
Codes of 3, 5 and 6 bits are split: 6 = 4 + 2 bits in two tables (see `tables`), 5 = 4 + 1 and 3 = 2 + 1, where the
upper bits of eight columns make a byte, which looks up the sum of their activations among the 256 there can be. Scales
stay as they are stored, except that 6-bit ones take a byte. Many rows of `x` are multiplied densely, with a few columns
of the weight decoded at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from qbench.formats.base import QuantizedTensor
from qbench.formats.gguf_blocks import GGUFBlocks
from qbench.formats.gguf_bytes import pack_planes
from qbench.formats.kquants import KQuant
from qbench.kernels.cpu.tables import DENSE_CHUNK, MAX_BAG_ROWS, bag_sums, bag_table, counted, even_starts, spans

UPPER_CHUNK = 1 << 20  # weights whose upper bits are made a table at a time
Table = tuple[int, torch.Tensor]  # bits, and what `bag_table` made
_SPLIT = {8: (8,), 6: (2, 4), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}  # lowest bits first; 1 is not a table


def supports(weight: QuantizedTensor) -> bool:
    return isinstance(weight.format, GGUFBlocks) and weight.shape[0] % 4 == 0


@dataclass(frozen=True)
class GGUFWeight:
    """A GGUF weight stored by input column: the bytes of its blocks plus, a column, 4 or 8 a table."""

    shape: tuple[int, int]  # [out, in]
    name: str
    sub: int  # columns of a sub-block
    tables: tuple[Table, ...]  # they add up to code - middle
    upper: torch.Tensor | None  # uint8 [in / 8, out]: a bit a column, lowest first
    upper_value: float  # what such a bit stands for
    scale: torch.Tensor  # float16 [blocks, out]
    minimum: torch.Tensor | None  # float16 [blocks, out]; a K-quant's is negative
    scale_codes: torch.Tensor | None  # uint8 or int8 [sub-blocks, out]: factor of the block's scale
    minimum_codes: torch.Tensor | None  # uint8 [sub-blocks, out]: the same for the minimum
    nibbles: bool  # both lie in `scale_codes`, the minimum's in the upper half

    @classmethod
    def repack(cls, weight: QuantizedTensor) -> GGUFWeight:
        format, (out, width) = weight.format, weight.shape
        assert isinstance(format, GGUFBlocks)
        blocks = weight.parts["blocks"].view(out, -1, format.nbytes)
        codes, found = format.fields(blocks) if isinstance(format, KQuant) else format.from_bytes(blocks)
        scale, minimum = found.get("d", found.get("scale")), found.get("minimum")
        assert scale is not None
        if "dmin" in found:
            minimum = -found["dmin"]
        scales, mins = found.get("scales"), found.get("mins")
        nibbles = format.bits == 2
        if nibbles:
            assert scales is not None and mins is not None
            scales, mins = scales | mins << 4, None
        by_column = _by_column(codes)
        if codes.dtype == torch.int8:
            by_column = by_column.view(torch.uint8) ^ 128
        middle = 1 << (format.bits - 1) if minimum is None else 0
        tables, upper, shift = [], None, 0
        for bits in _SPLIT[format.bits]:
            part = (by_column >> shift) & ((1 << bits) - 1)
            if bits == 1:
                upper = pack_planes(part.T.contiguous(), 1, 1).T.contiguous()
            else:
                tables.append((bits, bag_table(part, bits, 1 << shift, 0 if shift else -middle)))
            shift += bits
        return cls(
            shape=(out, width),
            name=format.name,
            sub=format.sub if isinstance(format, KQuant) else format.columns,
            tables=tuple(tables),
            upper=upper,
            upper_value=float(1 << (format.bits - 1)),
            scale=_by_column(scale.half()),
            minimum=None if minimum is None else _by_column(minimum.half()),
            scale_codes=None if scales is None else _by_column(scales),
            minimum_codes=None if mins is None else _by_column(mins),
            nibbles=nibbles,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.upper, self.scale, self.minimum, self.scale_codes, self.minimum_codes)
        return sum(table.nbytes for _, table in self.tables) + sum(t.nbytes for t in tensors if t is not None)

    def uses_bags(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_BAG_ROWS

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
        rows = x.float()
        out, width = self.shape
        scale, minimum = self._scales()
        y = rows.new_zeros(len(rows), out) if bias is None else bias.float().repeat(len(rows), 1)
        if minimum is not None:
            y.addmm_(rows.reshape(len(rows), -1, self.sub).sum(2), minimum)
        product = _bag_product if self.uses_bags(x) else _dense_product
        for start, stop in spans(width, width if self.upper is None else UPPER_CHUNK // out, self.sub):
            product(y, rows[:, start:stop], self._tables(start, stop), scale[start // self.sub : stop // self.sub])
        return y.to(x.dtype)

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 scale and minimum ``[sub-blocks, out]``."""
        scales, mins = self.scale_codes, self.minimum_codes
        if self.nibbles:
            assert scales is not None
            scales, mins = scales & 15, scales >> 4
        return _scaled(self.scale, scales), None if self.minimum is None else _scaled(self.minimum, mins)

    def _tables(self, start: int, stop: int) -> list[Table]:
        """The tables of columns `start` to `stop`."""
        tables = [(bits, table[start:stop]) for bits, table in self.tables]
        return tables if self.upper is None else [*tables, (8, self._upper_table(start, stop))]

    def _upper_table(self, start: int, stop: int) -> torch.Tensor:
        """A table of the upper bits: each byte is 0 or the bit where it lies among eight, which its factor undoes."""
        assert self.upper is not None
        out = self.shape[0]
        table = torch.empty(stop - start, out + 8, dtype=torch.uint8)
        by_eight = table.view(-1, 8, out + 8)
        torch.bitwise_and(self.upper[start // 8 : stop // 8].unsqueeze(1), _EIGHT_BITS, out=by_eight[..., :out])
        by_eight[..., out:] = _eight_factors(self.upper_value)
        return table


def _bag_product(y: torch.Tensor, x: torch.Tensor, tables: list[Table], scale: torch.Tensor) -> None:
    """Adds the product of `x` ``[n, columns]`` to `y` ``[n, out]``; `scale` ``[sub-blocks, out]``."""
    (n, width), (subs, out) = x.shape, scale.shape
    columns, starts = counted(width, n), even_starts(width, width // subs, n)
    y += _sums(tables, columns, starts, x.reshape(-1)).view(n, subs, out).mul_(scale).sum(1)


def _dense_product(y: torch.Tensor, x: torch.Tensor, tables: list[Table], scale: torch.Tensor) -> None:
    """The same for many rows."""
    width, (subs, out) = x.shape[1], scale.shape
    sub = width // subs
    for start, stop in spans(width, DENSE_CHUNK // out, sub):
        columns = counted(stop - start)
        w = _sums([(bits, table[start:stop]) for bits, table in tables], columns, columns, None)
        w.view(-1, sub, out).mul_(scale[start // sub : stop // sub].unsqueeze(1))
        y.addmm_(x[:, start:stop], w)


def _sums(
    tables: list[Table], columns: torch.Tensor, starts: torch.Tensor, factors: torch.Tensor | None
) -> torch.Tensor:
    """`bag_sums` of all tables together, ``[bags, out]``."""
    bits, table = tables[0]
    sums = bag_sums(table, bits, columns, starts, factors)
    for bits, table in tables[1:]:
        sums += bag_sums(table, bits, columns, starts, factors)
    return sums


_EIGHT_BITS = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8).view(8, 1)


@lru_cache
def _eight_factors(value: float) -> torch.Tensor:
    """uint8 ``[8, 8]``: factor and offset behind a table's row, for each of `_EIGHT_BITS`."""
    return torch.tensor([[value / (1 << k), 0.0] for k in range(8)]).view(torch.uint8)


def _scaled(half: torch.Tensor, codes: torch.Tensor | None) -> torch.Tensor:
    """Float32 ``[sub-blocks, out]`` of float16 `half` ``[blocks, out]`` times `codes` ``[sub-blocks, out]``."""
    values = half.float()
    if codes is None:
        return values
    blocks, out = values.shape
    return (codes.view(blocks, -1, out) * values.unsqueeze(1)).view(-1, out)


def _by_column(values: torch.Tensor) -> torch.Tensor:
    """``[out, blocks, k]`` as ``[blocks * k, out]``."""
    return values.flatten(1).T.contiguous()
