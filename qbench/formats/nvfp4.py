"""NVFP4: E2M1 codes in blocks of 16, an E4M3 scale a block, a float32 scale for the tensor.

``value = level * scale * scale_2``. Both scales are kept as multipliers; files that hold the reciprocal of the second
(compressed-tensors' global scale) convert when they are written. ``scale_2 = absmax / (6 * 448)`` puts the block of the
largest weight at the top of E4M3's range. A block scale is kept at or above ``2^-9``, E4M3's smallest value, so that no
block of small weights becomes zero by its scale.

Four over six (arXiv 2512.02010): E2M1 has nothing between 4 and 6, so a block may do better when its largest weight
becomes 4. Each block takes what gives the smaller squared error; ``scale_2`` is then ``absmax / (6 * 256)``, which
leaves room for block scales half as large again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Params, block_absmax
from qbench.formats.e2m1 import E2M1_LEVELS, E2M1_MAX, e2m1_codes
from qbench.formats.fourbit import FourBit
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

BLOCK = 16
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
FOUR_OVER_SIX_TOP = 256.0  # block scale of the largest weight when it becomes 6; 384 when it becomes 4


@dataclass(frozen=True)
class NVFP4(FourBit):
    """E2M1 codes with both levels of scale. `four_over_six` chooses the level of each block's largest weight."""

    name: ClassVar[str] = "nvfp4"
    levels: ClassVar[tuple[float, ...]] = E2M1_LEVELS

    four_over_six: bool = False

    @property
    def weighs_importance(self) -> bool:
        return self.four_over_six

    def block_size(self, in_features: int) -> int:
        return BLOCK

    def shared(self, weight: torch.Tensor) -> Params:
        return self.shared_among([weight])[0]

    def shared_among(self, weights: Sequence[torch.Tensor]) -> list[Params]:
        """One float32 ``[1, 1]`` tensor scale that all `weights` fit under.

        Linears that an engine fuses (query, key and value; gate and up) must have one in common.
        """
        absmax = torch.stack([weight.abs().max().float() for weight in weights]).max().view(1, 1)
        scale = absmax / (E2M1_MAX * (FOUR_OVER_SIX_TOP if self.four_over_six else E4M3_MAX))
        return [{"scale_2": torch.where(scale == 0, torch.ones_like(scale), scale)}] * len(weights)

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        absmax, scale_2 = block_absmax(columns, self.name), shared["scale_2"]
        found = {"scale": _e4m3(absmax / (E2M1_MAX * scale_2)), "scale_2": scale_2.expand_as(absmax)}
        if not self.four_over_six:
            return found
        other = found | {"scale": _e4m3(absmax / (4 * scale_2))}
        better = self._error(columns, other, importance) < self._error(columns, found, importance)
        return found | {"scale": torch.where(better, other["scale"], found["scale"])}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return e2m1_codes(columns / self.multiplier(params))

    def multiplier(self, params: Params) -> torch.Tensor:
        return params["scale"] * params["scale_2"]

    def write_params(self, params: Params) -> Params:
        return {"scale": params["scale"].to(torch.float8_e4m3fn), "scale_2": params["scale_2"][:1, :1]}

    def read_params(self, parts: Params) -> Params:
        return {"scale": parts["scale"].float(), "scale_2": parts["scale_2"]}

    def _error(self, columns: torch.Tensor, params: Params, importance: torch.Tensor | None) -> torch.Tensor:
        """Squared error of each row ``[out, 1]``."""
        error = (self.decode(self.encode(columns, params), params) - columns).square()
        return (error if importance is None else error * importance).sum(1, keepdim=True)


def _e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Block scales as they will be read back; that of a block of zeros is 1."""
    scale = torch.where(scale == 0, torch.ones_like(scale), scale).clamp(E4M3_SMALLEST, E4M3_MAX)
    return scale.to(torch.float8_e4m3fn).float()
