"""FP8: the weight divided by a float32 scale, cast to an 8-bit float: E4M3 (largest finite value 448) or E5M2 (57344).

The cast does not saturate by itself (PyTorch gives NaN or infinity beyond the range), so values are clamped first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.formats.base import Format, Params, QuantizedTensor, block_absmax
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

Element = Literal["e4m3", "e5m2"]
ELEMENT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
TILE = 128  # rows and columns that share a scale with granularity "block"


def float8_codes(values: torch.Tensor, element: Element) -> torch.Tensor:
    """The nearest 8-bit float of each float32 value, ties to even, saturating."""
    largest = ELEMENT_MAX[element]
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2)


@dataclass(frozen=True)
class FP8(Format):
    """Codes of `element` with a scale (absmax over the largest value) for the tensor, each row, 128 columns of a row
    (`group`), or 128 x 128 tile (`block`)."""

    name: ClassVar[str] = "fp8"

    granularity: Literal["tensor", "channel", "group", "block"] = "channel"
    element: Element = "e4m3"

    @property
    def rows_share(self) -> bool:
        return self.granularity in ("tensor", "block")

    def block_size(self, in_features: int) -> int:
        return TILE if self.granularity in ("group", "block") else in_features

    def shared(self, weight: torch.Tensor) -> Params:
        """Each row's number, by which `fit` knows the rows of a tile."""
        if self.granularity != "block":
            return {}
        return {"row": torch.arange(weight.shape[0], device=weight.device).unsqueeze(1)}

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        absmax = block_absmax(columns, self.name)
        if self.granularity == "tensor":
            absmax = absmax.amax().expand_as(absmax)
        if self.granularity == "block":
            rows = int(shared["row"].max()) + 1
            tiles = torch.split(absmax.view(rows, -1), TILE)  # [128, blocks side by side] each
            absmax = torch.cat([tile.amax(0, keepdim=True).expand_as(tile) for tile in tiles]).reshape(-1, 1)
        scale = absmax / ELEMENT_MAX[self.element]
        return {"scale": torch.where(scale == 0, torch.ones_like(scale), scale)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return float8_codes(columns / params["scale"], self.element)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return codes.float() * params["scale"]

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        step = {"tensor": codes.shape[0], "channel": 1, "group": 1, "block": TILE}[self.granularity]
        parts = {"codes": codes, "scale": params["scale"][::step].contiguous()}
        if g_idx is not None:
            parts["g_idx"] = g_idx.to(torch.int32)
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), parts)

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        scale = parts["scale"]
        if self.granularity == "block":
            scale = scale.repeat_interleave(TILE, 0)[: shape[0]]
        return parts["codes"], {"scale": scale}

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        if self.granularity != "block":
            return None
        return shape[0] * shape[1] + 4 * -(-shape[0] // TILE) * self.blocks(shape[1])
