"""bitsandbytes: NF4 and FP4 blocks, and LLM.int8's rows. From the weights alone."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
from torch import nn

from qbench.peers.tools import Layer, Work, code_bytes, load_model, tensor_bytes

INT8_LARGEST = 127


def quantize(work: Work) -> nn.Module:
    """The model; each of the linears has the library's codes and their state as `codes`."""
    model = load_model(work)
    for name in work.modules:
        module: Any = model.get_submodule(name)
        weight = module.weight.data
        if work.method == "llm-int8":
            module.codes = bnb.int8_vectorwise_quant(weight.half())
        else:
            module.codes = bnb.quantize_4bit(weight, quant_type=work.method, **work.options)
        module.weight = None
    return model


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The linears, decoded in float32."""
    decode = _int8 if work.method == "llm-int8" else _four_bit
    return {name: decode(model.get_submodule(name), work.options) for name in work.modules}


def _four_bit(module: Any, options: dict[str, Any]) -> Layer:
    packed, state = module.codes
    stored = [state.absmax]
    if state.nested:
        stored += [state.state2.absmax, state.offset.reshape(1)]
    weight = bnb.dequantize_4bit(packed, state).float()
    return Layer(weight, code_bytes(weight, 4) + tensor_bytes(*stored))


def _int8(module: Any, options: dict[str, Any]) -> Layer:
    codes, row_absmax, _ = module.codes
    weight = codes.float() * (row_absmax.float() / INT8_LARGEST)[:, None]
    activation = {"name": "llm-int8", "threshold": options["threshold"]}
    return Layer(weight, tensor_bytes(codes, row_absmax), activation)
