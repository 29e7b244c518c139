"""NF4: 16 levels at the quantiles of a normal distribution, scaled by the block's absmax (QLoRA, arXiv 2305.14314).

The table is bitsandbytes'; a code is an index into it (ascending values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params, QuantizedTensor
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class NF4(Format):
    """4-bit normal-float codes with a float32 absmax for each block of `group_size` input columns of a row."""

    name: ClassVar[str] = "nf4"

    group_size: int = 64

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise QbenchError(f"format nf4: group_size is {self.group_size}; allowed: 2 or more columns.")

    def block_size(self, in_features: int) -> int:
        return self.group_size

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        absmax = columns.abs().amax(1, keepdim=True)
        if not bool(torch.isfinite(absmax).all()):
            raise QbenchError("format nf4: a weight is NaN or infinite.")
        return {"absmax": absmax}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        absmax = params["absmax"]
        relative = columns / torch.where(absmax == 0, torch.ones_like(absmax), absmax)
        return torch.bucketize(relative, _boundaries().to(columns.device)).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return levels().to(codes.device)[codes.int()] * params["absmax"]

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        from qbench.formats.bitpack import pack_bits

        parts = {"codes": pack_bits(codes, 4), "absmax": params["absmax"].contiguous()}
        if g_idx is not None:
            parts["g_idx"] = g_idx.to(torch.int32)
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), parts)

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        from qbench.formats.bitpack import unpack_bits

        return unpack_bits(parts["codes"], 4, shape[1]), {"absmax": parts["absmax"]}


def levels() -> torch.Tensor:
    """The 16 float32 levels, ascending."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32)


def _boundaries() -> torch.Tensor:
    """Midpoints between neighbours; a value on a midpoint goes to the lower level."""
    table = levels()
    return (table[1:] + table[:-1]) / 2
