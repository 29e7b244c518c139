"""HQQ: the authors' half-quadratic search for zero points, from the weights alone."""

from __future__ import annotations

from typing import Any

import torch
from hqq.core.quantize import Quantizer
from torch import nn

from qbench.peers.tools import Layer, Work, code_bytes, load_model, tensor_bytes


def quantize(work: Work) -> nn.Module:
    """The model; each of the linears has the library's codes and their state as `codes`."""
    model = load_model(work)
    for name in work.modules:
        module: Any = model.get_submodule(name)
        module.codes = Quantizer.quantize(
            module.weight.data, **work.options, axis=1, compute_dtype=torch.float32, device=work.device
        )
    return model


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The linears, decoded in float32; scales and zero points in the 16 bits that the library computes in."""
    return {name: _layer(model.get_submodule(name), work.options["nbits"]) for name in work.modules}


def _layer(module: Any, bits: int) -> Layer:
    packed, state = module.codes
    weight = Quantizer.dequantize(packed, state).float()
    return Layer(weight, code_bytes(weight, bits) + tensor_bytes(state["scale"].half(), state["zero"].half()))
