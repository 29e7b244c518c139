"""Tiny random models of every model family that compression is tested on, by transformers' own code.

Some channels of every norm, value and inner projection are much louder than the others, as in trained models, so that
transforms have something to do.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qbench.formats.activation import INPUT_SCALE
from qbench.formats.base import QuantizedTensor
from qbench.models.source import ModelSource
from tests.tiny import byte_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},  # biases on q, k and v
    "qwen3": {},  # norms on queries and keys
    "gemma3_text": {  # norms times 1 + weight, before and after attention and MLP; embeddings times sqrt(hidden)
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "phi3": {},  # q, k and v in one linear; gate and up in one
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MORE: dict[str, dict[str, Any]] = {  # relatives whose blocks differ in what transforms must know
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LOUD = ("up_proj", "v_proj", "qkv_proj", "gate_up_proj")


def family_config(family: str, width: int = 64, **overrides: Any) -> Any:
    """Two blocks, hidden size `width`, four query and two key-value heads, every width a multiple of 32.

    With 256 every linear has a multiple of 256 inputs, as K-quants ask for.
    """
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": width,
        "intermediate_size": max(128, width),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return AutoConfig.for_model(family, **(fields | (FAMILIES | MORE)[family] | overrides))


def random_model(family: str, width: int = 64, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model in evaluation mode, the same in every call."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family, width, **overrides), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            plus_one = 0.0 if "gemma" in family else 1.0
            parameter.data = plus_one + 0.3 * torch.randn_like(parameter)
            if "layernorm" in name:
                parameter.data[::13] += 4
        elif name.endswith("bias"):
            parameter.data = 0.3 * torch.randn_like(parameter)
        elif "embed" in name:
            parameter.data = torch.randn_like(parameter) / (width**0.5 if "gemma" in family else 1)
        else:
            size = 0.3 if any(part in name for part in ("q_proj", "k_proj")) else 1  # no attention to one token alone
            parameter.data = size * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
            if any(part in name for part in LOUD):
                parameter.data[..., ::11, :] *= 4
            if "qkv_proj" in name:
                parameter.data[: -parameter.shape[0] // 4] *= 0.3
    return model


def make_family(folder: Path, family: str, width: int = 64, *, dtype: torch.dtype = torch.float32, **kw: Any) -> Path:
    """Writes `random_model` in Hugging Face layout, with a tokenizer, to `folder` and returns it."""
    random_model(family, width, **kw).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def decoded(source: ModelSource) -> dict[str, torch.Tensor]:
    """All tensors of a model, in float."""
    loaded = {name: source.load(name) for name in source.tensors}
    return {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in loaded.items()}


@torch.no_grad()
def logits(source: ModelSource, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers' model puts out with the tensors of `source`, computed in `dtype` (norms too).

    Inputs of linears are rounded where `source` says so.
    """
    model = _model(json.dumps(source.config, sort_keys=True), dtype)
    weights = _fused({name: tensor.to(dtype) for name, tensor in decoded(source).items()})
    if "lm_head.weight" not in weights:
        assert source.config["tie_word_embeddings"]
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if f"{name}.weight" in source.tensors and isinstance(module, torch.nn.Linear):
                stored = source.load(f"{name}.weight")
                if isinstance(stored, QuantizedTensor) and stored.activation is not None:
                    hooks.callback(module.register_forward_pre_hook(partial(_round_inputs, stored)).remove)
        result: torch.Tensor = model(input_ids=ids).logits
    return result


def _round_inputs(stored: QuantizedTensor, _: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    assert stored.activation is not None
    x = args[0].flatten(0, -2)
    return (stored.activation.round(x, stored.parts.get(INPUT_SCALE)).view_as(args[0]),)


@cache
def _model(config: str, dtype: torch.dtype) -> PreTrainedModel:
    settings = AutoConfig.for_model(**json.loads(config))
    settings._experts_implementation = "eager"  # the default has no float64
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    for name, module in list(model.named_modules()):
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, _DoubleNorm(module))
    return model


class _DoubleNorm(torch.nn.Module):
    """Transformers' norms compute in float32; this one does not."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.gemma = hasattr(norm, "eps")
        self.eps = norm.eps if self.gemma else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.gemma, self.eps)


def _fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, as files hold them, to the two stacks of transformers' code."""
    fused, experts = {}, {}
    for name, tensor in weights.items():
        path, expert, key = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if not expert:
            fused[path] = tensor
            continue
        index, projection, _ = key.split(".")
        projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(projection, projection)
        experts.setdefault(f"{path}.experts", {}).setdefault(projection, {})[int(index)] = tensor
    for path, found in experts.items():
        gate, up, down = (torch.stack([w[i] for i in range(len(w))]) for w in map(found.get, PROJECTIONS))
        fused |= {f"{path}.gate_up_proj": torch.cat([gate, up], 1), f"{path}.down_proj": down}
    return fused
