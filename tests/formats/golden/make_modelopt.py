"""Makes modelopt.safetensors: small weights in NVFP4, MXFP8 and MXFP4 as NVIDIA's Model Optimizer stores them.

    pip install torch==2.13.0 nvidia-modelopt==0.47.0 requests
    python tests/formats/golden/make_modelopt.py

Names are ``<scheme>-<weight>.<part>``. Its MX scales follow the ceiling rule. Of MXFP4 only scales are kept: its codes
break ties downwards, where the specification and the other tools round to even. ``four_over_six`` holds the scales of
blocks whose largest weight becomes 6 and 4.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from weights import edge_weight, random_weight


def main() -> None:
    random = random_weight(32, 256, 2)
    random[5, :128] = 0
    random[6, :128] *= 1e-6  # block scales below the smallest E4M3 value
    weights = {"random": random, "edges": edge_weight()}
    tensors = dict(weights)
    for name, weight in weights.items():
        weight = weight.float()
        quantized, scale = MXFP8QTensor.quantize(weight.clone())
        tensors[f"mxfp8-{name}.codes"], tensors[f"mxfp8-{name}.scale"] = quantized._quantized_data, scale
        _, scale = MXFP4QTensor.quantize(weight.clone(), 32)
        tensors[f"mxfp4-{name}.scale"] = scale.view(len(weight), -1)
        weight = weight[weight.abs().amax(1) < 1e3]  # one huge block leaves nothing of the others
        quantized, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
        tensors[f"nvfp4-{name}.codes"] = quantized._quantized_data
        tensors[f"nvfp4-{name}.scale"], tensors[f"nvfp4-{name}.scale_2"] = scale, scale_2
        tensors[f"nvfp4-{name}.weight"] = quantized.dequantize(
            torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
        )
        absmax = weight.unflatten(1, (-1, 16)).abs().amax(-1)
        for top, factor in ((6, 1.0), (4, 1.5)):
            quantizer = SimpleNamespace(
                block_sizes={-1: 16, "four_over_six": True}, global_amax=absmax.max(), _amax=absmax * factor
            )
            scale, scale_2 = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight)
            tensors[f"four_over_six-{name}.scale_{top}"], tensors[f"four_over_six-{name}.scale_2"] = scale, scale_2
    del tensors["nvfp4-random.weight"]
    path = Path(__file__).with_name("modelopt.safetensors")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main()
