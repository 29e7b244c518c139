"""GPTQModel: GPTQ and AWQ, the living successor of AutoGPTQ and AutoAWQ."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from qbench.peers.tools import Layer, Work, tensor_bytes

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(os.cpu_count() or 1))
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
from gptqmodel import GPTQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import FORMAT, AWQConfig, GPTQConfig

# GPTQ zero points as they are ("v2"): after quantizing, the library keeps the files' "v1" ones, one less, in memory.
CONFIGS = {"gptq": (GPTQConfig, {"format": FORMAT.GPTQ_V2}), "awq": (AWQConfig, {})}


def quantize(work: Work) -> nn.Module:
    """The model with the library's packed linears."""
    kind, fixed = CONFIGS[work.method]
    config = kind(**work.options, **fixed, device=work.device, offload_to_disk=False)
    dtype = torch.float16 if work.method == "awq" else torch.float32  # its AWQ layers hold 16-bit floats only
    model = GPTQModel.load(work.model, quantize_config=config, dtype=dtype)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in work.rows]
    model.quantize(rows, batch_size=1, calibration_data_min_length=1)
    quantized: nn.Module = model.model
    return quantized


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The packed linears. A symmetric format's zero points and an orderly `g_idx` need not be stored."""
    return {name: _layer(module, work.options) for name, module in model.named_modules() if _is_packed(module)}


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, BaseQuantLinear)


def _layer(module: Any, options: dict[str, Any]) -> Layer:
    if isinstance(module, AwqTorchLinear):
        weight = dequantize_gemm(
            module.qweight, module.qzeros, module.scales.float(), options["bits"], options["group_size"]
        ).T
    else:
        module.eval()
        weight = module.dequantize_weight().T.float()
    stored = [module.qweight, module.scales]
    if not options["sym"]:
        stored.append(module.qzeros)
    if options.get("desc_act"):
        stored.append(module.g_idx)
    return Layer(weight, tensor_bytes(*stored))
