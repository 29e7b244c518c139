"""What the 4-bit formats without a zero point have in common: a code names one of 16 levels, and the levels are
multiplied by a number a block. Two codes a byte, low nibble = even column."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Format, Params, QuantizedTensor
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


class FourBit(Format):
    """Base of the formats whose value is ``levels[code] * multiplier``."""

    levels: ClassVar[tuple[float, ...]]  # the value of each of the 16 codes, before the multiplier

    @abstractmethod
    def multiplier(self, params: Params) -> torch.Tensor:
        """Float32 factor of the levels, in the shape of the parameters."""

    @abstractmethod
    def write_params(self, params: Params) -> Params:
        """The stored parts of fitted `params` ``[out, blocks]``."""

    @abstractmethod
    def read_params(self, parts: Params) -> Params:
        """Float32 parameters ``[out, blocks]`` (``[1, 1]`` for the tensor's) from stored parts."""

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        levels = torch.tensor(self.levels, dtype=torch.float32, device=codes.device)
        return levels[codes.int()] * self.multiplier(params)

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        from qbench.formats.bitpack import pack_bits

        parts = {"codes": pack_bits(codes, 4), **self.write_params(params)}
        if g_idx is not None:
            parts["g_idx"] = g_idx.to(torch.int32)
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), {k: v.contiguous() for k, v in parts.items()})

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        from qbench.formats.bitpack import unpack_bits

        return unpack_bits(parts["codes"], 4, shape[1]), self.read_params(parts)
