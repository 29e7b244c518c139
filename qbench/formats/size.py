"""How many bytes a format will take, known before any weight is read."""

from __future__ import annotations

from functools import cache

from qbench.formats.base import Format


@cache
def _parts(format: Format, in_features: int) -> tuple[int, int]:
    """Bytes of one row's parts, and those of a second row: parameters of the whole tensor are in the first only."""
    import torch

    one, two = (format.quantize(torch.ones(rows, in_features)).nbytes for rows in (1, 2))
    return one, two - one


def stored_bytes(format: Format, shape: tuple[int, int]) -> int:
    """Bytes of a weight ``[out, in]`` in `format`, scales included."""
    known = format.stored_bytes(shape)
    if known is not None:
        return known
    first, other = _parts(format, shape[1])
    return first + (shape[0] - 1) * other
