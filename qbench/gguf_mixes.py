"""llama.cpp's mixes: which of a model's tensors get more bits than the type the file is named after.

``q4_k_m`` is Q4_K with Q6_K for half of the value and down projections: those of the first and last eighth of the
blocks, and of every third block between. The rules are those of llama.cpp's quantizer (`llama-quant.cpp`), for the
decoder blocks' linears; an untied head is Q6_K in all of them. A tied head is the embedding and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qbench.models.structure import block_count, layer_index

MIXES = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m")
HEAD = "lm_head"


def mixed_formats(mix: str, modules: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """The format's name for each of `modules` that is not in the mix's own type. `config` is the model's."""
    formats = {module: _format(mix, module, config) for module in modules}
    return {module: name for module, name in formats.items() if name is not None}


def _format(mix: str, module: str, config: Mapping[str, Any]) -> str | None:
    if module == HEAD:
        return "q6_k"
    index = layer_index(module)
    assert index is not None
    count = block_count(config)
    eight_experts = 8 in (config.get("num_local_experts"), config.get("num_experts"))
    part = module.rpartition(".")[2]
    if part == "v_proj":
        return "q8_0" if eight_experts else _value(mix, index, count, config)
    if part == "k_proj":
        return "q8_0" if eight_experts else None
    if part == "qkv_proj":
        return {"q3_k_m": "q4_k", "q3_k_l": "q4_k", "q4_k_m": "q5_k", "q5_k_m": "q6_k"}.get(mix)
    if part == "o_proj":
        if eight_experts:
            return "q5_k" if mix in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else None
        return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mix)
    if part in ("down_proj", "w2"):
        return _down(mix, index, count)
    return None


def _value(mix: str, index: int, count: int, config: Mapping[str, Any]) -> str | None:
    heads = config["num_attention_heads"]
    shared_by = heads // (config.get("num_key_value_heads") or heads)
    found = {"q2_k": "q4_k" if shared_by >= 4 else "q3_k", "q3_k_m": "q5_k" if index < 2 else "q4_k"}.get(mix)
    if mix == "q3_k_l" or (mix == "q4_k_s" and index < 4):
        found = "q5_k"
    if mix in ("q4_k_m", "q5_k_m") and _more_bits(index, count):
        found = "q6_k"
    seventy_billion = count == 80 and shared_by > 1  # 8 query heads share one value head: more bits cost little
    if seventy_billion and (found in ("q3_k", "q4_k") or (found is None and mix[:4] in ("q3_k", "q4_k"))):
        return "q5_k"
    return found


def _down(mix: str, index: int, count: int) -> str | None:
    if mix in ("q4_k_m", "q5_k_m"):
        return "q6_k" if _more_bits(index, count) else None
    if mix == "q4_k_s":
        return "q5_k" if index < count // 8 else None
    if mix == "q3_k_m":
        return "q5_k" if index < count // 16 else "q4_k"
    return {"q2_k": "q3_k", "q3_k_l": "q5_k"}.get(mix)


def _more_bits(index: int, count: int) -> bool:
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
