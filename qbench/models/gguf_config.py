"""GGUF metadata as the content of Hugging Face's config.json."""

from __future__ import annotations

from typing import Any

from qbench.errors import QbenchError
from qbench.models.gguf_file import GGUFFile
from qbench.models.gguf_names import ARCHITECTURES
from qbench.models.gguf_rope import rope_settings
from qbench.registry import nearest

_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config of a GGUF decoder. Raises `QbenchError` when its architecture or a setting is not supported."""
    path = file.paths[0]
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise QbenchError(f"{path}: architecture {name!r} is not supported. {nearest(name, ARCHITECTURES)}")
    if file.get(f"{name}.expert_count", int, 0):
        raise QbenchError(f"{path}: mixture-of-experts models of architecture {name!r} are not supported")
    architecture = ARCHITECTURES[name]
    hidden = file.get(f"{name}.embedding_length", int)
    heads = file.get(f"{name}.attention.head_count", int)
    key_heads = file.get(f"{name}.attention.head_count_kv", int, heads)
    if min(hidden, heads, key_heads) < 1 or heads % key_heads:
        raise QbenchError(f"{path}: {heads} query heads and {key_heads} key-value heads do not go together")
    head_dim = file.get(f"{name}.attention.key_length", int, hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise QbenchError(f"{path}: heads of {head_dim} dimensions; an even number is allowed")
    if file.get(f"{name}.attention.value_length", int, head_dim) != head_dim:
        raise QbenchError(f"{path}: keys and values of unequal length are not supported")
    biased = [part for part in ("attn_q", "attn_k", "attn_v", "attn_output") if f"blk.0.{part}.bias" in file.tensors]
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.get(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.get(f"{name}.context_length", int),
        "rms_norm_eps": file.get(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope_settings(file, name, head_dim),
        "vocab_size": _embedding_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where transformers 4 looks
    if name == "llama":
        if biased and len(biased) < 4:
            raise QbenchError(f"{path}: only {', '.join(biased)} have biases; all four projections or none may")
        config["attention_bias"] = bool(biased)
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    for key, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        config[f"{field}_token_id"] = token if token >= 0 else None
    return config


def _embedding_rows(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise QbenchError(f"{file.paths[0]}: a two-dimensional tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """The dtype that load() gives for the linears: the stored one, or float32 when they are dequantized."""
    linear = file.tensors.get("blk.0.attn_q.weight")
    return _DTYPES.get(linear.type, "float32") if linear else "float32"
