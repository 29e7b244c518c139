"""What the decoder needs to know of a model, read from its config.json through transformers' own config classes
(their defaults, their names for older fields)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from qbench.errors import QbenchError
from qbench.registry import nearest


@dataclass(frozen=True)
class _Family:
    model_type: str
    qkv_bias: bool = False  # always; otherwise `attention_bias` says so, for all four projections
    qk_norm: bool = False  # RMSNorm over each head's queries and keys
    window_everywhere: bool = False  # `sliding_window` alone decides; otherwise `layer_types` does


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("mistral", window_everywhere=True),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True),
}

_IGNORED = ("model_type", "dtype", "torch_dtype", "quantization_config")  # say nothing of the decoder's shape


@dataclass(frozen=True)
class Architecture:
    """The shape of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: dict[str, Any]  # transformers' rope_parameters
    windows: tuple[int | None, ...]  # each layer's sliding window

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """Raises `QbenchError` on an architecture, activation or value that is not supported."""
        name = (config.get("architectures") or ["(none)"])[0]
        if name not in _FAMILIES:
            raise QbenchError(f"config.json: architecture {name!r} is not supported. {nearest(name, _FAMILIES)}")
        family = _FAMILIES[name]
        fields = {k: deepcopy(v) for k, v in config.items() if k not in _IGNORED}  # nested dicts get changed
        try:
            full = CONFIG_MAPPING[family.model_type](**fields)
        except (StrictDataclassError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise QbenchError(f"config.json: {name} does not accept it: {error}") from error
        if full.hidden_act != "silu":
            raise QbenchError(f"config.json: hidden_act {full.hidden_act!r} is not supported; allowed: 'silu'.")
        heads, kv_heads = full.num_attention_heads, full.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise QbenchError(
                f"config.json: num_key_value_heads is {kv_heads}; allowed: a divisor of num_attention_heads ({heads})."
            )
        attention_bias = bool(getattr(full, "attention_bias", False))
        return cls(
            vocab_size=full.vocab_size,
            hidden_size=full.hidden_size,
            intermediate_size=full.intermediate_size,
            num_layers=full.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=getattr(full, "head_dim", None) or full.hidden_size // heads,
            norm_eps=full.rms_norm_eps,
            max_positions=full.max_position_embeddings,
            tied_head=bool(full.tie_word_embeddings),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(getattr(full, "mlp_bias", False)),
            qk_norm=family.qk_norm,
            rope=full.rope_parameters,
            windows=_windows(full, family),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor, in the order they are used; a tied head is not among them."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        wide, narrow = self.num_heads * dim, self.num_kv_heads * dim
        linears = {
            "self_attn.q_proj": (wide, hidden, self.qkv_bias),
            "self_attn.k_proj": (narrow, hidden, self.qkv_bias),
            "self_attn.v_proj": (narrow, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, wide, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (hidden,)
            if self.qk_norm:
                shapes |= {f"{prefix}self_attn.{norm}.weight": (dim,) for norm in ("q_norm", "k_norm")}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def _windows(config: Any, family: _Family) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    window: int | None = config.sliding_window if hasattr(config, "sliding_window") else None
    if family.window_everywhere:
        return (window,) * layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
