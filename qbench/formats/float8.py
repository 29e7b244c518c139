"""FP8 E4M3: the weight divided by a float32 scale, cast to ``float8_e4m3fn`` (largest finite value 448).

The cast does not saturate by itself (PyTorch gives NaN above 464), so values are clamped first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params, QuantizedTensor
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

E4M3_MAX = 448.0


@dataclass(frozen=True)
class FP8(Format):
    """E4M3 codes with one scale (``absmax / 448``) for each output channel or for the tensor."""

    name: ClassVar[str] = "fp8"

    granularity: Literal["tensor", "channel"] = "channel"

    def block_size(self, in_features: int) -> int:
        return in_features

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        absmax = columns.abs().amax(1, keepdim=True)
        if self.granularity == "tensor":
            absmax = absmax.amax().expand_as(absmax)
        if not bool(torch.isfinite(absmax).all()):
            raise QbenchError("format fp8: a weight is NaN or infinite.")
        scale = absmax / E4M3_MAX
        return {"scale": torch.where(scale == 0, torch.ones_like(scale), scale)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return (columns / params["scale"]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return codes.float() * params["scale"]

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        assert g_idx is None, "a scale a row needs no g_idx"
        scale = params["scale"][:1] if self.granularity == "tensor" else params["scale"]
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), {"codes": codes, "scale": scale.contiguous()})

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        return parts["codes"], {"scale": parts["scale"]}
