"""Rotary position embedding (arXiv 2104.09864) in Hugging Face's half-split order: default, linear, llama3 scaling."""

from __future__ import annotations

import math
from typing import Any

import torch

from qbench.errors import QbenchError

ROPE_TYPES = ("default", "linear", "llama3")


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of features, float32 ``[head_dim / 2]``.

    `rope` is transformers' ``rope_parameters``. Raises `QbenchError` on a `rope_type` that is not in `ROPE_TYPES`.
    """
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise QbenchError(f"config.json: rope_type {kind!r} is not supported. Known: {', '.join(ROPE_TYPES)}.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise QbenchError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; allowed: 1."
        )
    inverse: torch.Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if kind == "linear":
        return inverse / float(rope["factor"])
    if kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1's rule)."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves_in_context = float(rope["original_max_position_embeddings"]) * inverse / (2 * math.pi)
    keep = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return inverse * (keep + (1 - keep) / float(rope["factor"]))


def rotation(positions: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[T, 1, head_dim]`` of integer `positions` ``[T]``, computed in float32."""
    angles = positions.float().unsqueeze(1) * inverse
    angles = torch.cat((angles, angles), 1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads `x` ``[T, heads, head_dim]``."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
