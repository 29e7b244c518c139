"""The part of GGUF metadata that describes the network, from a Hugging Face config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from qbench.errors import QbenchError

ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> GGUF's
FILE_TYPES = {  # llama.cpp's general.file_type
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
}
ROPE_TYPES = ("default", "linear", "llama3")


def architecture_of(config: Mapping[str, Any]) -> str:
    """GGUF's name of a config's architecture. Raises `QbenchError` when GGUF export does not support the model."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURE_OF:
        known = ", ".join(ARCHITECTURE_OF)
        raise QbenchError(f"GGUF export does not support model_type {model_type!r}; supported: {known}.")
    if config.get("hidden_act", "silu") != "silu":
        raise QbenchError(f"GGUF export does not support hidden_act {config['hidden_act']!r}; supported: silu.")
    rope = rope_of(config)
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES or (kind == "llama3" and ARCHITECTURE_OF[model_type] != "llama"):
        raise QbenchError(
            f"GGUF export does not support rope scaling {kind!r} of {model_type}; supported: {ROPE_TYPES}."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise QbenchError(f"GGUF export does not support partial rotary embedding of {model_type}.")
    return ARCHITECTURE_OF[model_type]


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings with ``rope_type`` and ``rope_theta``, from where transformers 5 or 4 keeps them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the dimension of each."""
    heads: int = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def network_metadata(config: Mapping[str, Any], location: str) -> dict[str, Any]:
    """General and architecture keys. ``general.file_type`` is provisional: see `file_type`."""
    name = architecture_of(config)
    heads, key_heads, head_dim = heads_of(config)
    rope = rope_of(config)
    metadata: dict[str, Any] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": PurePath(location.rpartition(":")[2]).name,
        "general.alignment": 32,
        "general.quantization_version": 2,
        "general.file_type": 0,
        f"{name}.vocab_size": config["vocab_size"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": key_heads,
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        metadata[f"{name}.rope.scaling.type"] = "linear"
        metadata[f"{name}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "llama3":
        metadata[f"{name}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return metadata


def file_type(types: Counter[str]) -> int:
    """llama.cpp's number for the type that most matrices are in."""
    matrices = [(kind, count) for kind, count in types.most_common() if kind in FILE_TYPES]
    return FILE_TYPES[matrices[0][0]]


def network_notes(config: Mapping[str, Any]) -> list[str]:
    """What the file cannot say of the network."""
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < config["max_position_embeddings"]:
        return [f"The sliding window of {window} tokens is not stored: llama.cpp attends to the whole context."]
    return []
