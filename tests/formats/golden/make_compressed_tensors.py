"""Makes compressed_tensors.safetensors: small weights in FP8, MXFP8, MXFP4 and NVFP4 as compressed-tensors stores them.

    pip install torch==2.13.0 transformers==5.17.0 compressed-tensors==0.19.0
    python tests/formats/golden/make_compressed_tensors.py

Names are ``<scheme>-<weight>.<part>``. Scales of blocks are the library's own (``calculate_qparams`` over the block's
range, ``generate_gparam`` for NVFP4's reciprocal tensor scale), codes its ``quantize`` and packing.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from weights import edge_weight, random_weight

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
SCHEMES = {
    "fp8-tensor": FLOAT8 | {"strategy": "tensor"},
    "fp8-channel": FLOAT8 | {"strategy": "channel"},
    "fp8-block": FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
    "mxfp8": FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    "mxfp4": FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    "nvfp4": FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
                       "zp_dtype": torch.float8_e4m3fn},
}  # fmt: skip


def ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight of whatever shares a scale."""
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        tiles = [rows.split(128, 1) for rows in weight.split(128, 0)]
        low, high = ([[f(part) for part in row] for row in tiles] for f in (torch.min, torch.max))
        return torch.tensor(low), torch.tensor(high)
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def main() -> None:
    weights = {"random": random_weight(16, 256, 0), "tall": random_weight(130, 132, 1), "edges": edge_weight()}
    weights["tall"][128:, 128:] = 0
    tensors = dict(weights)
    for scheme, fields in SCHEMES.items():
        for name in ("tall",) if scheme == "fp8-block" else ("random", "edges"):
            weight, args = weights[name].float(), QuantizationArgs(**fields)
            global_scale = None
            if scheme == "nvfp4":
                weight = weight[weight.abs().amax(1) < 1e3]  # one huge block leaves nothing of the others
                global_scale = generate_gparam(weight.min(), weight.max())
                tensors[f"{scheme}-{name}.global_scale"] = global_scale
            scale, zero = calculate_qparams(*ranges(weight, args), args, global_scale=global_scale)
            codes = quantize(weight, scale, zero, args, global_scale=global_scale)
            if scheme.startswith("mx"):
                scale = compress_mx_scale(scale, torch.uint8)
            elif scheme == "nvfp4":
                scale = scale.to(torch.float8_e4m3fn)
            tensors[f"{scheme}-{name}.scale"] = scale
            tensors[f"{scheme}-{name}.codes"] = (
                codes.to(torch.float8_e4m3fn) if args.num_bits == 8 else pack_fp4_to_uint8(codes)
            )
    path = Path(__file__).with_name("compressed_tensors.safetensors")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main()
