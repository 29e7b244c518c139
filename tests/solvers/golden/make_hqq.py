"""Writes hqq.safetensors with the hqq package (0.2.8): ``pip install hqq && python make_hqq.py``."""

from pathlib import Path

import torch
from hqq.core.optimize import optimize_weights_proximal_legacy, optimize_weights_proximal_v2
from hqq.core.quantize import Quantizer
from safetensors.torch import save_file

weight = torch.distributions.StudentT(4.0)
torch.manual_seed(0)
tensors = {"weight": weight.sample((24, 128)) * 0.03}
for bits in (2, 3, 4, 8):
    for name, optimize in (("v2", optimize_weights_proximal_v2), ("default", optimize_weights_proximal_legacy)):
        Quantizer.optimize_weights = staticmethod(optimize)
        codes, meta = Quantizer.quantize(
            tensors["weight"], nbits=bits, group_size=32, axis=1, bitpack=False, device="cpu"
        )
        tensors[f"{name}.{bits}.codes"] = codes.to(torch.uint8).reshape(24, 128)
        tensors[f"{name}.{bits}.scale"] = meta["scale"].reshape(24, 4)
        tensors[f"{name}.{bits}.zero"] = meta["zero"].reshape(24, 4)
save_file(tensors, Path(__file__).with_name("hqq.safetensors"))
