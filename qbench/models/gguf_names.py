"""How GGUF names tensors and orders rows, and how Hugging Face does: both directions.

The ``llama`` architecture stores the rows of q and k (weights and biases) in the order that interleaved rotary
embedding wants: within each head, row ``2 i + j`` holds Hugging Face's row ``j * head_dim / 2 + i``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture and the transformers class with the same arithmetic."""

    model_type: str
    model_class: str
    interleaved_rows: bool  # q and k rows are in interleaved rotary order


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", False),
}

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE_BACK = {hf: gguf for gguf, hf in _WHOLE.items()}
_IN_BLOCK_BACK = {hf: gguf for gguf, hf in _IN_BLOCK.items()}


def to_huggingface(name: str) -> str:
    """Hugging Face's name of a GGUF tensor of a supported network."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, block, part, kind = name.split(".")
    return f"model.layers.{block}.{_IN_BLOCK[part]}.{kind}"


def to_gguf(name: str) -> str | None:
    """GGUF's name of a Hugging Face tensor; None when there is none."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    if match and match[2] in _IN_BLOCK_BACK:
        return f"blk.{match[1]}.{_IN_BLOCK_BACK[match[2]]}.{match[3]}"
    return _WHOLE_BACK.get(name)


def rows_to_gguf(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows ``[heads * head_dim, ...]`` from Hugging Face's order to the interleaved one."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def rows_to_huggingface(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `rows_to_gguf`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def rotary_heads(name: str, query_heads: int, key_heads: int) -> int | None:
    """How many heads a GGUF tensor's rows are reordered by (q by query heads, k by key heads); else None."""
    if re.fullmatch(r"blk\.\d+\.attn_q\.(weight|bias)", name):
        return query_heads
    if re.fullmatch(r"blk\.\d+\.attn_k\.(weight|bias)", name):
        return key_heads
    return None
