"""A model source whose linears are quantized to the nearest code when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from qbench.formats.base import Format, QuantizedTensor
from qbench.models.source import ModelSource, TensorInfo

BLOCK_LINEAR = ("_proj.weight",)


class QuantizedSource(ModelSource):
    """`inner` with `choose(name)`'s format for each linear of a block (None leaves it dense).

    With `act_order` each quantized weight's columns are spread over the groups at random (a non-trivial g_idx).
    """

    def __init__(self, inner: ModelSource, choose: Callable[[str], Format | None], act_order: bool = False) -> None:
        self.inner, self.choose, self.act_order = inner, choose, act_order
        self.location, self.config = inner.location, inner.config

    @property
    def revision(self) -> str:
        return self.inner.revision

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.inner.tensors

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        tensor = self.inner.load(name)
        format = self.choose(name) if name.endswith(BLOCK_LINEAR) else None
        if format is None:
            return tensor
        assert isinstance(tensor, torch.Tensor)
        if not self.act_order:
            return format.quantize(tensor)
        order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(tensor.numel()))
        quantized = format.quantize(tensor[:, order])  # groups of neighbours in the permuted order
        codes, params = format.unpack(quantized.parts, quantized.shape)
        inverse = torch.argsort(order)
        return format.pack(codes[:, inverse], params, g_idx=(inverse // format.block_size(len(order))).to(torch.int32))

    def write_side_files(self, folder: Path) -> list[str]:
        return self.inner.write_side_files(folder)
