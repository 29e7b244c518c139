"""llm-compressor: GPTQ, AWQ, SmoothQuant and plain rounding into the schemes of compressed-tensors."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import nn
from transformers import AutoTokenizer

from qbench.peers.tools import Layer, Work, code_bytes, load_model, outside

if not torch.cuda.is_available():
    IntermediatesCache.pin_memory = lambda *_, **__: None  # AWQ asks for it and torch has no CUDA to pin it for


def quantize(work: Work) -> nn.Module:
    """The model whose linears hold float weights beside their scales."""
    model = load_model(work)
    dataset = Dataset.from_dict({"input_ids": work.rows, "attention_mask": [[1] * len(row) for row in work.rows]})
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(work.model),
        dataset=dataset,
        recipe=_modifiers(work, outside(work, model)),
        num_calibration_samples=len(work.rows),
        max_seq_length=max(map(len, work.rows)),
        shuffle_calibration_samples=False,
    )
    return model


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The linears that have a scheme, rounded as the library rounds them."""
    found = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            weight = forward_quantize(module, module.weight.data, "weight", scheme.weights)
            nbytes = _stored_bytes(module, scheme.weights)
            found[name] = Layer(weight.detach().float(), nbytes, *_activation(module, scheme.input_activations))
    return found


def _activation(module: Any, args: QuantizationArgs | None) -> tuple[dict[str, Any] | None, float | None]:
    """The format of a linear's input in qbench's words, and its static scale, where it has one."""
    if args is None:
        return None, None
    plain = args.model_dump(mode="json")
    match kind := (plain["type"], args.num_bits, plain["strategy"]):
        case ("int", 8, "token"):
            return {"name": "int8", "granularity": "token"}, None
        case ("float", 8, "token"):
            return {"name": "fp8", "granularity": "token"}, None
        case ("float", 8, "tensor"):
            return {"name": "fp8", "granularity": "tensor"}, float(module.input_scale)
        case ("float", 8, "group") if args.group_size == 128:
            return {"name": "fp8", "granularity": "group"}, None
        case ("float", 8, "group") if args.group_size == 32:
            return {"name": "mxfp8"}, None
        case ("float", 4, "tensor_group"):  # the library keeps the divisor
            return {"name": "nvfp4"}, 1 / float(module.input_global_scale)
    raise ValueError(f"no activation format here is {kind}")


def _modifiers(work: Work, ignore: list[str]) -> list[Any]:
    options = dict(work.options)
    scheme, group_size = options.pop("scheme"), options.pop("group_size", None)
    asked: dict[str, Any] = {"targets": ["Linear"], "ignore": ignore}
    if group_size is None:
        asked["scheme"] = scheme
    else:
        chosen = preset_name_to_scheme(scheme, ["Linear"])
        chosen.weights.group_size = group_size
        asked = {"config_groups": {"group_0": chosen}, "ignore": ignore}
    match work.method:
        case "gptq":
            return [GPTQModifier(**asked, **options)]
        case "awq":
            return [AWQModifier(**options), QuantizationModifier(**asked)]
        case "smoothquant":
            return [SmoothQuantModifier(**options), QuantizationModifier(**asked)]
    return [QuantizationModifier(**asked, **options)]


def _stored_bytes(module: Any, args: QuantizationArgs) -> int:
    """Codes, scales in the dtype they are stored in, zero points where the format has them, the tensor's own scale."""
    scale = module.weight_scale
    width = args.scale_dtype.itemsize if args.scale_dtype is not None else scale.element_size()
    total = code_bytes(module.weight, args.num_bits) + scale.numel() * width
    if not args.symmetric:
        total += -(-scale.numel() * args.num_bits // 8)
    if args.actorder == ActivationOrdering.GROUP:
        total += 4 * module.weight.shape[1]
    if getattr(module, "weight_global_scale", None) is not None:
        total += 4
    return int(total)
