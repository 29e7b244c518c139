"""Where GGUF keeps a linear: the name of its weight, and for an expert its place in the tensor of all experts."""

from __future__ import annotations

import re

from qbench.models.gguf_names import to_gguf, to_huggingface

_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_OTHERS = {  # linears of families that are compressed but not written as GGUF models
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_OTHERS_BACK = {gguf: module for module, gguf in _OTHERS.items()}


def gguf_place(module: str) -> tuple[str, int | None] | None:
    """GGUF's name of a module's weight and, for an expert, its index; None when GGUF has no name for it."""
    module = module.replace(".mlp.gate_up_proj", ".mlp.up_proj")  # Phi-3's fused projection goes by ffn_up
    if (expert := _EXPERT.fullmatch(module)) and expert[3] in _PROJECTIONS:
        return f"blk.{expert[1]}.ffn_{_PROJECTIONS[expert[3]]}_exps.weight", int(expert[2])
    other = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if other and other[2] in _OTHERS:
        return f"blk.{other[1]}.{_OTHERS[other[2]]}.weight", None
    name = to_gguf(f"{module}.weight")
    return None if name is None else (name, None)


def module_of(name: str, expert: int | None = None) -> str:
    """The usual module of a place. Raises KeyError or ValueError when it is none of a known network."""
    if experts := _EXPERTS.fullmatch(name):
        if expert is None:
            raise ValueError(f"{name} holds all experts")
        return f"model.layers.{experts[1]}.mlp.experts.{expert}.{experts[2]}_proj"
    parts = name.split(".")
    if len(parts) == 4 and parts[2] in _OTHERS_BACK:
        return f"model.layers.{parts[1]}.{_OTHERS_BACK[parts[2]]}"
    return to_huggingface(name).removesuffix(".weight")


def usual_module(module: str) -> str:
    """The name that `module_of` gives the linear, whatever its own family calls it."""
    place = gguf_place(module)
    return module if place is None else module_of(*place)
