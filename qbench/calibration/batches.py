"""Token rows to batches: rows of equal length together, so that nothing is ever padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BATCH_TOKENS = 4096  # calibration tokens a forward pass takes at once


def token_batches(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Token ids ``[rows, n]`` each, the longest rows first; rows of equal length stay in their order."""
    batches: list[list[Sequence[int]]] = []
    for row in sorted(rows, key=len, reverse=True):
        last = batches[-1] if batches else None
        if last and len(last[0]) == len(row) and (len(last) + 1) * len(row) <= BATCH_TOKENS:
            last.append(row)
        else:
            batches.append([row])
    return [torch.tensor(batch, dtype=torch.long) for batch in batches]
