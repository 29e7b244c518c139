"""NVIDIA ModelOpt: its named configurations, as far as they run without CUDA.

A linear's input is multiplied by `pre_quant_scale` first where the configuration smooths (AWQ, SmoothQuant). A linear
whose input is not rounded has it folded into the dense weight.
"""

from __future__ import annotations

import copy
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from torch import nn

from qbench.peers.tools import Layer, Work, code_bytes, forward_all, load_model, outside, tensor_bytes

CONFIGS = {
    "int4_awq": "INT4_AWQ_CFG",
    "int4_blockwise_weight_only": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8": "INT8_DEFAULT_CFG",
    "int8_smoothquant": "INT8_SMOOTHQUANT_CFG",
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_per_channel_per_token": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "nvfp4_weight_only": "W4A16_NVFP4_CFG",
}
E4M3, E2M1 = (4, 3), (2, 1)
LARGEST = {8: 127.0, E4M3: 448.0}
NVFP4_BLOCK = 16


def quantize(work: Work) -> nn.Module:
    """The model with the library's quantizers in its linears."""
    config = copy.deepcopy(getattr(mtq, CONFIGS[work.method]))
    model = load_model(work)
    for entry in config["quant_cfg"]:
        if "block_size" in work.options and "block_sizes" in entry.get("cfg", {}):
            entry["cfg"]["block_sizes"][-1] = work.options["block_size"]
    config["quant_cfg"] += [{"quantizer_name": f"{name}.*", "enable": False} for name in outside(work, model)]
    weights_alone = work.method == "nvfp4_weight_only"  # its forward pass needs CUDA, and nothing is calibrated
    quantized: nn.Module = mtq.quantize(model, config, None if weights_alone else forward_all(work))
    return quantized


@torch.no_grad()
def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The linears, rounded by their own weight quantizers."""
    return {name: _layer(model.get_submodule(name)) for name in work.modules}


def _layer(module: Any) -> Layer:
    weight, quantizer, inputs = module.weight.data, module.weight_quantizer, module.input_quantizer
    bits = _bits(quantizer)
    if bits == E2M1:
        packed, scale, scale_2 = NVFP4QTensor.quantize(weight, NVFP4_BLOCK)
        rounded = packed.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: NVFP4_BLOCK})
        nbytes = code_bytes(weight, 4) + tensor_bytes(scale, scale_2)
    else:
        rounded = quantizer(weight)
        nbytes = code_bytes(weight, bits if isinstance(bits, int) else 8) + tensor_bytes(quantizer.amax)
    smoothing = getattr(inputs, "pre_quant_scale", None)
    if smoothing is not None:
        nbytes += tensor_bytes(smoothing)
    if not inputs.is_enabled:
        if smoothing is not None:
            rounded = rounded * smoothing
        return Layer(rounded.float(), nbytes)
    scale = LARGEST[_bits(inputs)]
    name = "int8" if _bits(inputs) == 8 else "fp8"
    if inputs.amax is None:  # found on the fly
        return Layer(rounded.float(), nbytes, {"name": name, "granularity": "token"}, None, smoothing)
    static = float(inputs.amax.max()) / scale
    return Layer(rounded.float(), nbytes, {"name": name, "granularity": "tensor"}, static, smoothing)


def _bits(quantizer: Any) -> Any:
    """The quantizer's bits: a number, or exponent and mantissa bits."""
    bits = quantizer.num_bits
    return tuple(bits) if isinstance(bits, list | tuple) else bits
