"""A tensor's bytes in a GGUF type, rows in Hugging Face's order."""

from __future__ import annotations

import torch

from qbench.errors import QbenchError
from qbench.export.gguf_types import BLOCK, stored_type
from qbench.formats import gguf_blocks
from qbench.formats.base import QuantizedTensor
from qbench.formats.bitpack import unpack_bits
from qbench.formats.gguf_blocks import GGUFBlocks, assemble
from qbench.formats.integer import Integer


def encode(name: str, tensor: torch.Tensor | QuantizedTensor, requested: str) -> tuple[str, torch.Tensor]:
    """The ggml type that `tensor` is stored in under `requested`, and its bytes: uint8 ``[rows, bytes a row]``.

    Raises `QbenchError` naming the tensor when its type cannot hold it.
    """
    shape = tuple(tensor.shape)
    format = tensor.format if isinstance(tensor, QuantizedTensor) else None
    try:
        kind = stored_type(name, format, shape, requested)
    except QbenchError as error:
        raise QbenchError(f"{name}: {error}") from None
    if isinstance(tensor, QuantizedTensor):
        if isinstance(format, GGUFBlocks) and format.kind == kind:
            return kind, tensor.parts["blocks"]
        if requested == "auto" and kind != "F16":
            return kind, _own_codes(name, tensor, kind)
        tensor = tensor.dequantize()
    if kind == "F32":
        return kind, tensor.float().unsqueeze(0).contiguous().view(torch.uint8)
    if kind == "F16":
        return kind, _float16(name, tensor).contiguous().view(torch.uint8)
    return kind, gguf_blocks.encode(kind, tensor.float())


def _own_codes(name: str, tensor: QuantizedTensor, kind: str) -> torch.Tensor:
    """Blocks with the codes and scales of `tensor` themselves; nothing is chosen again."""
    format, width = tensor.format, tensor.shape[1]
    assert isinstance(format, Integer)
    if "g_idx" in tensor.parts:
        raise QbenchError(
            f"{name}: its groups are not neighbouring columns (act_order: dynamic), which GGUF cannot store; "
            "compress with act_order: static"
        )
    codes = unpack_bits(tensor.parts["codes"], format.bits, width)
    scale = _per_block(tensor.parts["scale"], tensor)
    stored = _float16(name, scale)
    if kind == "Q8_0":
        return assemble((codes.to(torch.int16) - format.middle).to(torch.int8), stored)
    if kind == "Q4_0":
        return assemble(codes + (8 - format.middle), stored)
    minimum = -scale.float() * _per_block(tensor.parts["zero_point"], tensor).float()
    return assemble(codes, stored, _float16(name, minimum))


def _per_block(param: torch.Tensor, tensor: QuantizedTensor) -> torch.Tensor:
    """A parameter ``[rows or 1, groups]`` as one value for each block of 32: ``[rows, in / 32]``."""
    rows, width = tensor.shape
    blocks = width // BLOCK
    if param.shape[1] > 1:
        param = param.repeat_interleave(tensor.format.block_size(width) // BLOCK, 1)[:, :blocks]
    return param.expand(rows, blocks)


def _float16(name: str, values: torch.Tensor) -> torch.Tensor:
    largest = values.abs().max()
    if not torch.isfinite(largest.half()):
        raise QbenchError(f"{name}: a value of {float(largest):.6g} does not fit float16 (at most 65504)")
    return values.half()
