"""What a model is made of, told from its tensor names and shapes: which modules are linears of the decoder blocks,
and which names a recipe's pattern means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from qbench.errors import QbenchError
from qbench.models.source import TensorInfo

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# What decides which expert runs stays in floating point: it is tiny, and one wrong choice swaps a whole expert.
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "router", "shared_expert_gate")


def layer_index(name: str) -> int | None:
    """The decoder block a tensor or module belongs to; None for embeddings, final norm and head."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def block_count(config: Mapping[str, Any]) -> int:
    """The number of decoder blocks. Raises `QbenchError` when the config does not say it."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        raise QbenchError(f"config.json: num_hidden_layers is {count!r}; expected the number of decoder blocks.")
    return count


def head_dim(config: Mapping[str, Any]) -> int:
    """Channels of one attention head. Raises `QbenchError` when the config does not say it."""
    size, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int):
        return size
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise QbenchError("config.json: neither head_dim nor hidden_size and num_attention_heads say a head's size.")
    return hidden // heads


def linear_names(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[str]:
    """Modules (names without ``.weight``) that are compressed when a recipe says nothing else, in `tensors`' order
    sorted by block: every two-dimensional weight of a decoder block except MoE routers.

    Blocks beyond ``num_hidden_layers`` (multi-token prediction heads) are no part of the decoder and left alone.
    Raises `QbenchError` when the config does not say how many blocks there are.
    """
    count = block_count(config)
    found = []
    for name, info in tensors.items():
        index = layer_index(name)
        module = name.removesuffix(".weight")
        if index is None or index >= count or module == name or len(info.shape) != 2:
            continue
        if not any(module.endswith(f".{router}") for router in ROUTERS):
            found.append(module)
    return sorted(found, key=lambda module: layer_index(module) or 0)


def match(pattern: str, name: str) -> bool:
    """Whether `pattern` means the module `name`.

    A pattern is a run of whole dotted segments found anywhere in the name: ``layers.1`` is not ``layers.10`` and
    ``mlp.gate`` is not ``mlp.gate_proj``. ``*`` stands for any characters within one segment. ``re:EXPRESSION`` is
    a regular expression that has to match the whole name. Raises `QbenchError` when it is not a valid one.
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise QbenchError(f"The pattern {pattern!r} is not a valid regular expression: {error}.") from error
    wanted, segments = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(segment, glob) for segment, glob in zip(segments[start:], wanted, strict=False))
        for start in range(len(segments) - len(wanted) + 1)
    )


def weight_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Stored bytes of all tensors."""
    return sum(info.nbytes for info in tensors.values())
