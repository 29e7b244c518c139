"""Makes gptqmodel.safetensors: small linears packed, and dequantized again, by gptqmodel 7.7.0 alone.

Run in an environment of its own that holds gptqmodel (export/README.md says how to make one):

    python tests/export/golden/make.py

Each linear has 64 inputs and 32 outputs in groups of 32. Its name says bits, symmetry, order and checkpoint format:
``b4-asym-act-gptq``. Beside the four GPTQ tensors lies ``weight``, float16 ``[out, in]``: gptqmodel's dequantization.
Zero points of asymmetric linears cover the whole range, 0 included, so v1 files hold wrapped ones.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import FORMAT, METHOD
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

IN, OUT, GROUP = 64, 32, 32


def make(bits: int, sym: bool, act_order: bool, v1: bool) -> dict[str, torch.Tensor]:
    top = 2**bits - 1
    groups = torch.arange(IN) // GROUP
    g_idx = (groups[torch.randperm(IN)] if act_order else groups).to(torch.int32)
    codes = torch.randint(0, top + 1, (OUT, IN))
    zeros = torch.full((OUT, 2), 2 ** (bits - 1)) if sym else torch.randint(0, top + 1, (OUT, 2))
    scales = (torch.rand(OUT, 2) * 0.02 + 0.001).half().float()
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = (codes - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
    packed = TorchLinear(bits=bits, group_size=GROUP, sym=sym, desc_act=act_order, in_features=IN, out_features=OUT,
                         bias=False, pack_dtype=torch.int32, format=FORMAT.GPTQ_V2)  # fmt: skip
    packed.pack_original(linear, scales, zeros.float(), g_idx)
    packed.eval()
    weight = packed.dequantize_weight().T.contiguous().half()
    assert torch.equal(weight, linear.weight.data.half()), "gptqmodel lost a code"
    if v1:
        config = SimpleNamespace(bits=bits, pack_dtype=torch.int32, quant_method=METHOD.GPTQ, format=FORMAT.GPTQ)
        convert_gptq_v2_to_v1_format_module(packed, config)
    parts = {name: getattr(packed, name).contiguous().clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    return parts | {"weight": weight}


def main() -> None:
    torch.manual_seed(0)
    tensors = {}
    for bits in (2, 3, 4, 8):
        for sym, act_order, v1 in (
            (True, False, True),
            (False, False, True),
            (False, True, True),
            (False, False, False),
        ):
            name = f"b{bits}-{'sym' if sym else 'asym'}-{'act' if act_order else 'plain'}-{'gptq' if v1 else 'gptq_v2'}"
            tensors |= {f"{name}.{part}": tensor for part, tensor in make(bits, sym, act_order, v1).items()}
    save_file(tensors, Path(__file__).with_name("gptqmodel.safetensors"))


if __name__ == "__main__":
    main()
