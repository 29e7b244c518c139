"""NF4 and FP4 of bitsandbytes (QLoRA, arXiv 2305.14314): 16 levels in [-1, 1], scaled by the block's absmax.

NF4's levels lie at the quantiles of a normal distribution; a code is an index into them in ascending order. FP4 has
a sign, two bits of exponent and one of mantissa, and its codes are not in the order of their values.

Double quantization stores the absmax of 256 blocks (in row-major order over the tensor) as 8-bit codes: their mean is
taken off first, the rest is divided by its own largest magnitude and rounded to the 8-bit dynamic map
(arXiv 1511.04561 in the form of arXiv 2110.02861). Codes of weights are chosen with the absmax before this rounding,
as bitsandbytes does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import Params, block_absmax, group_refusal
from qbench.formats.fourbit import FourBit
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
_FP4_MAGNITUDES = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FP4_LEVELS = (*_FP4_MAGNITUDES, 0.0, *(-value for value in _FP4_MAGNITUDES[1:]))

NESTED_BLOCK = 256  # absmax values that share a second absmax
SMALLEST_ABSMAX = 1e-38  # keeps the reciprocal finite; a block of zeros gets the code of zero


@dataclass(frozen=True)
class Codebook(FourBit):
    """4-bit codes with an absmax for each block of `group_size` input columns of a row: float32, or `double_quant`."""

    group_size: int = 64
    double_quant: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise QbenchError(f"format {self.name}: group_size is {self.group_size}; allowed: 2 or more columns.")

    def refusal(self, in_features: int) -> str | None:
        return group_refusal(self.name, self.group_size, in_features)

    def block_size(self, in_features: int) -> int:
        return self.group_size

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        return {"absmax": block_absmax(columns, self.name)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        bounds, order = _ordered(self.levels, columns.device)
        relative = columns * (1 / params["absmax"].clamp(min=SMALLEST_ABSMAX))
        return order[torch.bucketize(relative, bounds)]

    def multiplier(self, params: Params) -> torch.Tensor:
        return params["absmax"]

    def write_params(self, params: Params) -> Params:
        absmax = params["absmax"]
        if not self.double_quant:
            return {"absmax": absmax}
        offset = absmax.mean()
        blocks = _in_nested_blocks(absmax - offset)
        scale = blocks.abs().amax(1, keepdim=True)
        table = dynamic_map().to(absmax.device)
        relative = blocks * (1 / scale.clamp(min=SMALLEST_ABSMAX))
        codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        return {
            "absmax_codes": codes.view(-1)[: absmax.numel()].view_as(absmax),
            "absmax_scale": scale.view(1, -1),
            "absmax_offset": offset.view(1, 1),
        }

    def read_params(self, parts: Params) -> Params:
        if not self.double_quant:
            return {"absmax": parts["absmax"]}
        codes = parts["absmax_codes"]
        values = _in_nested_blocks(dynamic_map().to(codes.device)[codes.int()]) * parts["absmax_scale"].view(-1, 1)
        return {"absmax": values.view(-1)[: codes.numel()].view(codes.shape) + parts["absmax_offset"]}

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        if not self.double_quant:
            return None
        blocks = shape[0] * self.blocks(shape[1])
        return shape[0] * -(-shape[1] // 2) + blocks + 4 * -(-blocks // NESTED_BLOCK) + 4


@dataclass(frozen=True)
class NF4(Codebook):
    """Normal-float codes."""

    name: ClassVar[str] = "nf4"
    levels: ClassVar[tuple[float, ...]] = NF4_LEVELS


@dataclass(frozen=True)
class FP4(Codebook):
    """4-bit float codes in bitsandbytes' numbering."""

    name: ClassVar[str] = "fp4"
    levels: ClassVar[tuple[float, ...]] = FP4_LEVELS


@lru_cache
def dynamic_map() -> torch.Tensor:
    """The 256 ascending float32 values of the signed 8-bit dynamic map.

    For each decade ``10**(i-6)``, i = 0..6, ``2**i`` evenly spaced magnitudes (the middles of as many intervals between
    0.1 and 1) with both signs; 0 and 1 complete it.
    """
    values = [torch.zeros(1), torch.ones(1)]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        magnitudes = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [magnitudes, -magnitudes]
    return torch.cat(values).sort().values


def _in_nested_blocks(values: torch.Tensor) -> torch.Tensor:
    """`values` flattened to ``[n, NESTED_BLOCK]``, zeros behind the last."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)


@lru_cache
def _ordered(levels: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Midpoints between neighbouring levels (a value on one goes to the lower) and the codes in ascending order."""
    values, order = torch.tensor(levels, dtype=torch.float32).sort(stable=True)
    return ((values[1:] + values[:-1]) / 2).to(device), order.to(device, torch.uint8)
