"""Attention of one step over the paged cache.

A step mixes requests that compute one token with requests that compute many. `StepPlan` sorts them once a step, all
layers share it:

- single tokens are attended in batches of similar context length (padded, masked), with the queries that share a
  key-value head laid along the query length, so that keys and values are not repeated;
- longer chunks are attended one by one, with a mask that knows where in its sequence the chunk starts.

Shapes: T tokens in the step, B requests in a batch, S context positions, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qbench.runtime.kv_cache import PagedKVCache
from qbench.runtime.scheduler import ScheduledRequest, ScheduledStep

Masks = dict[int | None, torch.Tensor | None]  # by sliding window: added to the scores, or None if nothing is hidden


@dataclass(frozen=True)
class Batch:
    """Requests that compute one token each."""

    rows: torch.Tensor  # int64 [B]: their rows in the step
    blocks: torch.Tensor | slice  # B equally long block tables, one after the other
    context: int  # S: the longest context
    masks: Masks  # [B, 1, 1, S]


@dataclass(frozen=True)
class Chunk:
    """One request that computes several tokens."""

    rows: slice
    blocks: torch.Tensor | slice
    context: int
    masks: Masks  # [tokens, S]; None: plainly causal, and the chunk starts at position 0


@dataclass(frozen=True)
class StepPlan:
    """Where each token of a step is, and who attends to what."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]
    batches: list[Batch]
    chunks: list[Chunk]

    @classmethod
    def build(
        cls, step: ScheduledStep, block_size: int, windows: set[int | None], dtype: torch.dtype, device: torch.device
    ) -> StepPlan:
        """`windows`: the sliding windows of the model's layers (None: full attention)."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        chunks = []
        singles: dict[int, list[tuple[int, ScheduledRequest]]] = {}
        for request in step.requests:
            first_row, count = len(ids), len(request.token_ids)
            context = request.start + count
            ids += request.token_ids
            positions += range(request.start, context)
            slots += [
                request.block_table[p // block_size] * block_size + p % block_size
                for p in range(request.start, context)
            ]
            if count == 1:
                similar = (-(-context // block_size)).bit_length()
                singles.setdefault(similar, []).append((first_row, request))
                continue
            at = torch.arange(request.start, context)
            plain = {w for w in windows if request.start == 0 and (w is None or context <= w)}
            masks = {w: None if w in plain else _mask(at, context, w, dtype, device) for w in windows}
            table = request.block_table[: -(-context // block_size)]
            chunks.append(Chunk(slice(first_row, first_row + count), _blocks(table, device), context, masks))
        return cls(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            batches=[_batch(group, block_size, windows, dtype, device) for group in singles.values()],
            chunks=chunks,
        )


def _batch(
    group: list[tuple[int, ScheduledRequest]],
    block_size: int,
    windows: set[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Batch:
    contexts = [request.start + 1 for _, request in group]
    context = max(contexts)
    width = -(-context // block_size)
    table = []
    for _, request in group:
        own = request.block_table[:width]
        table += own + own[-1:] * (width - len(own))
    at = torch.tensor(contexts) - 1
    masks: Masks = {}
    for window in windows:
        hides = min(contexts) < context or (window is not None and context > window)
        masks[window] = _mask(at, context, window, dtype, device)[:, None, None] if hides else None
    return Batch(torch.tensor([row for row, _ in group], device=device), _blocks(table, device), context, masks)


def _blocks(table: list[int], device: torch.device) -> torch.Tensor | slice:
    """Neighbouring blocks as a slice, which is read without a copy."""
    if table == list(range(table[0], table[0] + len(table))):
        return slice(table[0], table[0] + len(table))
    return torch.tensor(table, device=device)


def _mask(at: torch.Tensor, context: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Added to the scores ``[len(at), context]``: a token sees itself and, with a window, the window - 1 before it."""
    distance = at.unsqueeze(1) - torch.arange(context)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device)


def attend(
    q: torch.Tensor, cache: PagedKVCache, layer: int, plan: StepPlan, window: int | None, scale: float
) -> torch.Tensor:
    """Attention output ``[T, H, D]`` for queries `q` ``[T, H, D]``; the step's keys and values are in the cache."""
    out = torch.empty_like(q)
    for batch in plan.batches:
        out.index_copy_(0, batch.rows, _attend_batch(q.index_select(0, batch.rows), cache, layer, batch, window, scale))
    for chunk in plan.chunks:
        k, v = cache.read(layer, chunk.blocks)
        mask = chunk.masks[window]
        out[chunk.rows] = F.scaled_dot_product_attention(
            q[chunk.rows].transpose(0, 1).unsqueeze(0),  # [1, H, tokens, D]
            k[: chunk.context].transpose(0, 1).unsqueeze(0),  # [1, K, S, D]
            v[: chunk.context].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def _attend_batch(
    q: torch.Tensor, cache: PagedKVCache, layer: int, batch: Batch, window: int | None, scale: float
) -> torch.Tensor:
    requests, heads, dim = q.shape
    k, v = cache.read(layer, batch.blocks)
    k = k.view(requests, -1, *k.shape[1:])[:, : batch.context].transpose(1, 2)  # [B, K, S, D]
    v = v.view(requests, -1, *v.shape[1:])[:, : batch.context].transpose(1, 2)
    grouped = q.view(requests, k.shape[1], -1, dim)  # [B, K, H / K, D]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=batch.masks[window], scale=scale)
    return out.reshape(requests, heads, dim)
