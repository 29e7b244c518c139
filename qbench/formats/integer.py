"""Integer affine formats, 2 to 8 bits: ``value = (code - zero_point) * scale``.

Three choices that tools differ in, each a field here:

- `granularity`: one scale a tensor, an output channel, or a group of `group_size` neighbouring input columns.
- `symmetric`: the zero point is the middle code. With `full_range` the scale is ``2 * absmax / (2**bits - 1)`` and all
  codes are used (GPTQ, compressed-tensors; Q4_0 stores exactly this); without it the scale is
  ``absmax / (2**(bits-1) - 1)`` and the lowest code never occurs (classic absmax). With `signed_scale` the scale is
  ``extreme / -2**(bits-1)`` and has a sign: the weight of the largest magnitude becomes the lowest code, of which
  there is one more on that side (AutoRound; Q4_0 is fitted so).
- not `symmetric`: the range is widened to hold 0, so that a zero weight stays zero. With a float `zero_point_dtype`
  (HQQ's files) the zero point lies between codes: the range is that of the weights, and zero need not stay zero.

Scales and zero points are rounded to their stored dtype before any code is chosen, so that files which store float16
scales hold exactly the weights that were measured. Codes are unsigned: a symmetric code is its signed value plus
``2**(bits-1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params, QuantizedTensor, group_refusal
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


LARGEST_FLOAT_ZERO = 1024  # float16 still tells quarters of a step apart below it


@dataclass(frozen=True)
class Integer(Format):
    """Integer codes with a scale and, if not symmetric, a zero point for each tensor, channel or group."""

    name: ClassVar[str] = "int"

    bits: int = 8
    granularity: Literal["tensor", "channel", "group"] = "group"
    group_size: int | None = 128
    symmetric: bool = True
    full_range: bool = True
    scale_dtype: Literal["float16", "float32"] = "float16"
    zero_point_dtype: Literal["uint8", "float16", "float32"] = "uint8"
    signed_scale: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise QbenchError(f"format int: bits is {self.bits}; allowed: 2 to 8.")
        if self.granularity == "group":
            if self.group_size is None or self.group_size < 2:
                raise QbenchError(f"format int: group_size is {self.group_size}; allowed: 2 or more columns.")
        elif self.group_size is not None:
            object.__setattr__(self, "group_size", None)
        if self.symmetric:
            object.__setattr__(self, "zero_point_dtype", "uint8")
        if not (self.symmetric and self.full_range):
            object.__setattr__(self, "signed_scale", False)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code that stands for zero in the symmetric case."""
        return 1 << (self.bits - 1)

    @property
    def float_zero_point(self) -> bool:
        return self.zero_point_dtype != "uint8"

    @property
    def rows_share(self) -> bool:
        return self.granularity == "tensor"

    @property
    def holds_zero(self) -> bool:
        return not self.float_zero_point

    def refusal(self, in_features: int) -> str | None:
        return group_refusal(self.name, self.group_size, in_features)

    def block_size(self, in_features: int) -> int:
        return self.group_size if self.group_size is not None else in_features

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        if self.signed_scale:
            return {"scale": self._stored(self._extreme(columns) / -self.middle)}
        if self.symmetric:
            largest = self.max_code / 2 if self.full_range else self.middle - 1
            return {"scale": self._stored(self._absmax(columns) / largest)}
        low, high = self._range(columns)
        steps = (high - low) / self.max_code
        if self.float_zero_point:
            scale = self._stored(steps.maximum(low.abs() / LARGEST_FLOAT_ZERO))
            return {"scale": scale, "zero_point": self.rounded_zero_point(-low / scale)}
        scale = self._stored(steps)
        return {"scale": scale, "zero_point": (-low / scale).round().clamp(0, self.max_code)}

    def rounded_zero_point(self, zero_point: torch.Tensor) -> torch.Tensor:
        """A float32 zero point as it will be read back."""
        return zero_point.to(getattr(torch, self.zero_point_dtype)).float()

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        if self.float_zero_point:
            codes = (columns / params["scale"]).add_(params["zero_point"]).round_()
            return codes.clamp_(0, self.max_code).to(torch.uint8)
        zero = params.get("zero_point", self.middle)
        lowest = 1 if self.symmetric and not self.full_range else 0
        return (columns / params["scale"]).round_().add_(zero).clamp_(lowest, self.max_code).to(torch.uint8)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        zero = params.get("zero_point", self.middle)
        return (codes.float() - zero).mul_(params["scale"])

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        from qbench.formats.bitpack import pack_bits

        stored = params
        if self.granularity == "tensor":
            stored = {k: v[:1, :1] for k, v in params.items()}
        parts = {"codes": pack_bits(codes, self.bits), "scale": stored["scale"].to(getattr(torch, self.scale_dtype))}
        if not self.symmetric:
            parts["zero_point"] = stored["zero_point"].to(getattr(torch, self.zero_point_dtype))
        if g_idx is not None:
            parts["g_idx"] = g_idx.to(torch.int32)
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), {k: v.contiguous() for k, v in parts.items()})

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        from qbench.formats.bitpack import unpack_bits

        params = {k: v.float() for k, v in parts.items() if k in ("scale", "zero_point")}
        return unpack_bits(parts["codes"], self.bits, shape[1]), params

    def _absmax(self, columns: torch.Tensor) -> torch.Tensor:
        absmax = columns.abs().amax(1, keepdim=True)
        return absmax.amax().expand_as(absmax) if self.granularity == "tensor" else absmax

    def _extreme(self, columns: torch.Tensor) -> torch.Tensor:
        """The value of the largest magnitude, with its sign."""
        extreme = columns.gather(1, columns.abs().argmax(1, keepdim=True))
        return extreme[extreme.abs().argmax()].expand_as(extreme) if self.granularity == "tensor" else extreme

    def _range(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = columns.amin(1, keepdim=True), columns.amax(1, keepdim=True)
        if not self.float_zero_point:
            low, high = low.clamp(max=0), high.clamp(min=0)
        if self.granularity == "tensor":
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        return low, high

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale` as it will be read back; a block of zeros, or too small for the dtype, gets 1: all codes zero."""
        rounded = scale.to(getattr(torch, self.scale_dtype)).float()
        if not bool(torch.isfinite(rounded).all()):
            found = float(scale.abs().max())
            raise QbenchError(
                f"format int: a scale of {found:.6g} does not fit {self.scale_dtype} (a NaN, infinite or huge weight)."
            )
        return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
