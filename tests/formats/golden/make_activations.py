"""Makes activations.safetensors: inputs of a linear as compressed-tensors and bitsandbytes round them.

    pip install torch==2.13.0 transformers==5.17.0 compressed-tensors==0.19.0 bitsandbytes==0.50.2
    python tests/formats/golden/make_activations.py

``x`` is ``[9, 256]``: columns with outliers, a token of zeros. ``<scheme>`` is ``x`` rounded by
compressed-tensors' ``fake_quantize`` with scales found on the fly (NVFP4: under a static tensor scale).
``llm-int8.*`` are bitsandbytes' codes, row statistics and outlier columns of ``x`` and of a weight, and its product.
"""

from pathlib import Path

import bitsandbytes  # noqa: F401  (registers its operators)
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from safetensors.torch import save_file
from weights import random_weight

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
      "zp_dtype": torch.float8_e4m3fn}  # fmt: skip
SCHEMES = {
    "fp8-token": FLOAT8 | {"strategy": "token"},
    "fp8-group": FLOAT8 | {"strategy": "group", "group_size": 128},
    "mxfp8": FLOAT8 | MX,
    "nvfp4": {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": "local"} | NV,
}
THRESHOLD = 6.0


def inputs() -> torch.Tensor:
    x = random_weight(9, 256, 5).float()
    x[:, 17] *= 40
    x[3, 200] = -70.0
    x[5] = 0
    x[6] = (torch.arange(256) % 127 - 63.5) / 17
    return x


def main() -> None:
    x, weight = inputs(), random_weight(32, 256, 6).float()
    tensors = {"x": x, "weight": weight}
    for name, fields in SCHEMES.items():
        args = QuantizationArgs(**fields)
        global_scale = generate_gparam(x.min(), x.max()) if name == "nvfp4" else None
        batch = x.unsqueeze(0)
        scale, zero = compute_dynamic_scales_and_zp(batch, args, torch.nn.Module(), global_scale=global_scale)
        tensors[name] = fake_quantize(batch, scale, zero, args, global_scale=global_scale)[0]
    ops = torch.ops.bitsandbytes
    codes, rows, columns = ops.int8_vectorwise_quant(x.clone(), THRESHOLD)
    weight_codes, weight_rows, _ = ops.int8_vectorwise_quant(weight.clone(), 0.0)
    product, _ = ops.int8_mixed_scaled_mm(x, codes, weight_codes, rows, weight_rows, columns)
    tensors |= {"llm-int8.codes": codes, "llm-int8.absmax": rows, "llm-int8.columns": columns,
                "llm-int8.weight_codes": weight_codes, "llm-int8.weight_absmax": weight_rows,
                "llm-int8.product": product}  # fmt: skip
    path = Path(__file__).with_name("activations.safetensors")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main()
