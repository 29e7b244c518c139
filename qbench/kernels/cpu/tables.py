"""PyTorch's quantized embedding bag as a product: tables of 2, 4 or 8-bit codes with a row for each input column.

The bag adds up table rows, each times a float32 factor, and decodes rows in registers. With a column's activation as
its row's factor that is a matrix-vector product with the codes; without factors and a bag a row, it decodes.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from qbench.formats.gguf_bytes import pack_planes

_BAGS = {
    2: torch.ops.quantized.embedding_bag_2bit_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
}
TABLE_BITS = tuple(_BAGS)
MAX_BAG_ROWS = 6  # rows of `x`; from here on decoding once and multiplying densely is faster
DENSE_CHUNK = 1 << 17  # weights decoded at a time: their float32 values stay in the processor's cache


def bag_table(codes: torch.Tensor, bits: int, factor: float, offset: float) -> torch.Tensor:
    """A table of uint8 `codes` ``[in, out]`` that stand for ``factor * code + offset``.

    uint8 ``[in, out * bits / 8 + 4]`` (8 bit: + 8): packed codes, then factor and offset, float16 (8 bit: float32).
    """
    affine = torch.tensor([factor, offset], dtype=torch.float32 if bits == 8 else torch.float16)
    return torch.cat((pack_planes(codes, bits, 1), affine.view(torch.uint8).expand(len(codes), -1)), 1)


def bag_sums(
    table: torch.Tensor, bits: int, columns: torch.Tensor, starts: torch.Tensor, factors: torch.Tensor | None
) -> torch.Tensor:
    """Float32 sums ``[bags, out]`` of decoded rows, each times its factor; a bag goes up to the next start.

    `columns` int32: which rows, one after the other; `starts` int32 ``[bags]``: where in `columns` each bag starts.
    """
    sums: torch.Tensor = _BAGS[bits](table, columns, starts, False, 0, False, factors, None, False)
    return sums


@lru_cache(maxsize=256)
def counted(stop: int, repeats: int = 1) -> torch.Tensor:
    """int32 0 to `stop`, `repeats` times."""
    return torch.arange(stop, dtype=torch.int32).repeat(repeats)


@lru_cache(maxsize=256)
def even_starts(width: int, size: int, repeats: int = 1) -> torch.Tensor:
    """int32 starts of bags of `size` columns in `repeats` inputs of `width` columns, one after the other."""
    return torch.arange(0, width * repeats, size, dtype=torch.int32)


def spans(width: int, size: int, multiple: int) -> list[tuple[int, int]]:
    """Starts and stops of runs of about `size` columns, whole `multiple`s but for the last."""
    step = max(size // multiple, 1) * multiple
    return [(start, min(start + step, width)) for start in range(0, width, step)]
