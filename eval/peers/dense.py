"""transformers' own network in float32 with the values that a qbench model stands for: the judge of the runtime."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qbench.formats.base import QuantizedTensor
from qbench.models.source import ModelSource


def dense(tensor: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """The float32 values of a tensor in any form."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()


def float32_model(source: ModelSource) -> PreTrainedModel:
    """Every tensor of `source`, dequantized, in transformers' code; a tied head is tied."""
    fields = {key: value for key, value in source.config.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    values = {name: dense(source.load(name)) for name in source.tensors}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """transformers' greedy `count` ids after `ids`; end tokens do not end it."""
    prompt = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


@torch.inference_mode()
def margin(model: PreTrainedModel, ids: list[int]) -> float:
    """How far the likeliest next token's logit is above the second: near 0, a tie that rounding decides."""
    first, second = model(torch.tensor([ids])).logits[0, -1].topk(2).values.tolist()
    return float(first - second)
