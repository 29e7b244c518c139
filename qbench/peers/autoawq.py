"""AutoAWQ: the authors' AWQ in its archived package. It quantizes on a processor but cannot load its own files there,
so its packed linears are decoded before anything is saved."""

from __future__ import annotations

from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.modules.linear import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from torch import nn
from transformers import AutoTokenizer

from qbench.peers.tools import Layer, Work, tensor_bytes


def quantize(work: Work) -> nn.Module:
    """The model with packed linears; what calibration rows lack of a whole last row is lost to the library."""
    made = AutoAWQForCausalLM.from_pretrained(
        work.model, torch_dtype=torch.float32, device_map=work.device, trust_remote_code=False
    )
    made.quantize(
        AutoTokenizer.from_pretrained(work.model),
        quant_config={**work.options, "version": "GEMM"},
        calib_data=work.rows,
        max_calib_samples=len(work.rows),
        max_calib_seq_len=max(map(len, work.rows)),
    )
    model: nn.Module = made.model
    return model


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The packed linears, their float16 scales multiplied in float32."""
    return {name: _layer(module) for name, module in model.named_modules() if isinstance(module, WQLinear_GEMM)}


def _layer(module: Any) -> Layer:
    group_size = module.group_size
    weight = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), module.w_bit, group_size)
    return Layer(weight.T, tensor_bytes(module.qweight, module.qzeros, module.scales))
