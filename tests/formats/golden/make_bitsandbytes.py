"""Makes bitsandbytes.safetensors: small weights in NF4 and FP4, with and without double quantization.

    pip install torch==2.13.0 bitsandbytes==0.50.2 safetensors
    python tests/formats/golden/make_bitsandbytes.py

Names are ``<kind>-<group>.<part>``; the first weight of a byte lies in its high nibble. The second level of double
quantization is had from the library's plain operator: its processor kernel looks codes up in a coarse table and takes a
neighbour of the nearest code for values within about 1e-3 of zero.
"""

from pathlib import Path

import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type, quantize_4bit
from safetensors.torch import save_file
from weights import random_weight

plain_quantize_blockwise = torch.ops.bitsandbytes.quantize_blockwise.default


def midpoints(kind: str) -> torch.Tensor:
    """Blocks of 32 with absmax 1: the midpoints of neighbouring levels, both zeros, tiny values; zeros; subnormals."""
    levels = get_4bit_type(kind, device="cpu").sort().values
    middle = (levels[1:] + levels[:-1]) / 2
    values = torch.cat([torch.tensor([1.0]), middle, torch.tensor([0.0, -0.0, 1e-9, -1e-9])])
    block = torch.nn.functional.pad(values, (0, 32 - len(values)))
    return torch.stack([block, -block, torch.zeros(32), torch.full((32,), 1e-40), block * 3e38])


def main() -> None:
    weight = random_weight(40, 256, seed=0)
    weight[3, :64] = 0
    tensors = {"random": weight, "dynamic_map": create_dynamic_map()}
    for kind in ("nf4", "fp4"):
        tensors[f"{kind}.levels"] = get_4bit_type(kind, device="cpu")
        tensors[f"{kind}.edges"] = midpoints(kind)
        for name, values, group in (
            ("edges", tensors[f"{kind}.edges"], 32),
            ("random", weight.float(), 32),
            ("random", weight.float(), 64),
            ("random", weight.float(), 256),
        ):
            codes, state = quantize_4bit(values, blocksize=group, quant_type=kind)
            tensors[f"{kind}-{name}-{group}.codes"] = codes.flatten()
            tensors[f"{kind}-{name}-{group}.absmax"] = state.absmax
            offset = state.absmax.mean()
            nested, scale = plain_quantize_blockwise._op_dk(
                torch._C.DispatchKey.CompositeExplicitAutograd, state.absmax - offset, create_dynamic_map(), 256
            )
            tensors[f"{kind}-{name}-{group}.absmax_codes"] = nested
            tensors[f"{kind}-{name}-{group}.absmax_scale"] = scale
            tensors[f"{kind}-{name}-{group}.absmax_offset"] = offset
            _, state = quantize_4bit(values, blocksize=group, quant_type=kind, compress_statistics=True)
            off = (state.absmax.int() - nested.int()).abs()
            assert torch.equal(state.state2.absmax, scale) and torch.equal(state.offset, offset)
            print(kind, name, group, "codes that the processor kernel chooses otherwise:", int((off > 0).sum()))
    path = Path(__file__).with_name("bitsandbytes.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main()
