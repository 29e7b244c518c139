"""Which tensors a GGUF decoder must hold, and their shapes, so that a damaged file is refused when it is opened."""

from __future__ import annotations

from typing import Any

from qbench.errors import QbenchError
from qbench.models.gguf_file import GGUFFile, GGUFTensor

Shape = tuple[int, ...]


def block_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """GGUF part name -> weight shape, for one decoder block of `config` (Hugging Face's)."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if config["model_type"] == "qwen3":
        shapes |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    return shapes


def biased_parts(config: dict[str, Any]) -> set[str]:
    """The parts of a block that have a bias."""
    attention = {"attn_q", "attn_k", "attn_v"} if config["model_type"] == "qwen2" else set()
    if config.get("attention_bias"):
        attention |= {"attn_q", "attn_k", "attn_v", "attn_output"}
    return attention | ({"ffn_gate", "ffn_up", "ffn_down"} if config.get("mlp_bias") else set())


def check_tensors(file: GGUFFile, config: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The tensors of the network, each present and of its shape. Raises `QbenchError` naming the first that is not."""
    path, hidden, vocabulary = file.paths[0], config["hidden_size"], config["vocab_size"]
    blocks = config["num_hidden_layers"]
    if not 1 <= blocks <= len(file.tensors):
        raise QbenchError(f"{path}: {blocks} blocks are stated, the file has {len(file.tensors)} tensors")
    expected: dict[str, Shape] = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = (vocabulary, hidden)
    biased = biased_parts(config)
    for part, shape in block_shapes(config).items():
        for block in range(blocks):
            expected[f"blk.{block}.{part}.weight"] = shape
            if part in biased:
                expected[f"blk.{block}.{part}.bias"] = shape[:1]
    for name, shape in expected.items():
        if name not in file.tensors:
            raise QbenchError(f"{path}: tensor {name!r} is missing")
        if file.tensors[name].shape != shape:
            raise QbenchError(f"{path}: tensor {name!r} has shape {file.tensors[name].shape}, expected {shape}")
    return {name: file.tensors[name] for name in file.tensors if name in expected}
