"""AWQ's search for the range of each block of a weight: rounding finer is worth clipping a few.

A block's range is narrowed to whatever fraction gives the least error of the block's own output. That error is
``d^T (x^T x) d`` with ``d`` what rounding changes, so the blocks' Gram matrices stand for the tokens, and all of them
count. A sample would not do: the few tokens whose activations are a thousand times the others' are the ones that a
clipped weight breaks.
"""

from __future__ import annotations

import torch

from qbench.calibration.channels import in_blocks
from qbench.formats.base import Format
from qbench.formats.integer import Integer
from qbench.transforms.base import CLIP_RANGES

CLIP_STEPS = 20  # so that a range is never narrowed to less than 1 - CLIP_RANGES / CLIP_STEPS of itself

Limits = tuple[torch.Tensor, torch.Tensor]  # low and high, each [out, blocks]


def clip_search(weight: torch.Tensor, format: Format, gram: torch.Tensor) -> Limits:
    """The bounds of each block of `weight` ``[out, in]`` that give the least error of its share of the output.

    `gram` ``[blocks, size, size]`` holds ``x^T x`` of every block of inputs.
    """
    size = gram.shape[1]
    parts = torch.split(weight, size, 1)
    if not isinstance(format, Integer) or format.symmetric:
        high = torch.stack([part.abs().amax(1) for part in parts], 1)
        low = -high
    else:
        low, high = (torch.stack([extreme(part, 1) for part in parts], 1) for extreme in (torch.amin, torch.amax))
    least = torch.full_like(high, torch.inf)
    kept = torch.ones_like(high)
    for step in range(CLIP_RANGES):
        shrink = 1 - step / CLIP_STEPS
        rounded = format.quantize(clamped(weight, (low * shrink, high * shrink), size)).dequantize()
        difference = in_blocks(weight - rounded, size)
        error = ((difference @ gram) * difference).sum(2).T
        better = error < least
        least = torch.where(better, error, least)
        kept = torch.where(better, shrink, kept)
    return low * kept, high * kept


def clamped(weight: torch.Tensor, limits: Limits, block_size: int) -> torch.Tensor:
    """`weight` ``[out, in]`` with each block of `block_size` columns inside its `limits`."""
    low, high = (bound.repeat_interleave(block_size, 1)[:, : weight.shape[1]] for bound in limits)
    return torch.clamp(weight, low, high)
