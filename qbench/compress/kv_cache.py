"""Keys and values of one block while it is compressed: their scales, and later blocks that feel them rounded.

Attention hands its keys (after the rotary embedding) and values to the cache that the block is called with and goes on
with what it gets back. The caches here stand in for transformers' own; only `update` is ever asked of them.
"""

from __future__ import annotations

from typing import Any

import torch

from qbench.compress.passes import Passes
from qbench.compress.skeleton import PassEnded
from qbench.errors import QbenchError
from qbench.formats.kv_cache import KVFormat

CACHE = "past_key_values"  # the argument of transformers' decoder blocks


class _Seen:
    """Notes the largest magnitudes of keys and values and ends the pass: nothing behind them is needed."""

    def __init__(self) -> None:
        self.head_dim: int | None = None
        self.largest = [0.0, 0.0]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.head_dim = keys.shape[-1]
        for i, x in enumerate((keys, values)):
            amax = float(x.abs().amax())
            self.largest[i] = amax if not amax <= self.largest[i] else self.largest[i]  # a NaN stays
        raise PassEnded


class _Rounding:
    """Gives keys and values ``[rows, kv_heads, tokens, head_dim]`` back as a cache in `format` would."""

    def __init__(self, format: KVFormat, scales: tuple[float | None, float | None]) -> None:
        self.format, self.scales = format, scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self._rounded(x, scale) for x, scale in zip((keys, values), self.scales, strict=True))

    def _rounded(self, x: torch.Tensor, scale: float | None) -> torch.Tensor:
        tokens = x.transpose(1, 2)  # [rows, tokens, kv_heads, head_dim]
        decoded = self.format.decode(self.format.encode(tokens.flatten(0, 1), scale), scale)
        return decoded.view(tokens.shape).transpose(1, 2)


def round_keys_and_values(passes: Passes, name: str, format: KVFormat) -> tuple[float, float] | None:
    """Rounds keys and values in every later pass of the block; a calibrated format's scales for them, else None.

    Raises `QbenchError` naming the block when it uses no cache, `format` cannot keep its heads, or keys or values are
    all zeros or not finite on the calibration rows.
    """
    seen = _Seen()
    for batch, call in zip(passes.hidden, passes.calls, strict=True):
        call.kwargs[CACHE] = seen
        try:
            passes.skeleton.run_block(passes.block, batch, call)
        except PassEnded:
            pass
        if not format.calibrated:
            break
    if seen.head_dim is None:
        raise QbenchError(f"{name}: its attention keeps no keys and values, so KV-cache format {format.name} has none.")
    try:
        format.check(seen.head_dim)
        keys, values = (_scale(format, *pair) for pair in zip(("keys", "values"), seen.largest, strict=True))
    except QbenchError as error:
        raise QbenchError(f"{name}: KV-cache format {format.name}: {error}") from error
    rounding = _Rounding(format, (keys, values))
    for call in passes.calls:
        call.kwargs[CACHE] = rounding
    return None if keys is None or values is None else (keys, values)


def _scale(format: KVFormat, which: str, largest: float) -> float | None:
    try:
        return format.scale(largest)
    except QbenchError as error:
        raise QbenchError(f"{which}: {error}") from error
