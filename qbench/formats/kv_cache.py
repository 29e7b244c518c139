"""How the runtime keeps keys and values: 8-bit floats under calibrated scales, or integers with scales of their own.

Keys come after their rotary embedding. ``x`` is ``[tokens, kv_heads, head_dim]``, and what is kept of each token stands
by itself (each part is ``[tokens, kv_heads, ...]``), because a paged cache writes, shares and drops tokens one at a
time. That rules out KIVI's (arXiv 2402.02750) scales of one key channel over many tokens; of its two schemes the one
for values, a range for each token and group of channels, is what `Int4KV` does to keys and values alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import Params
from qbench.formats.float8 import ELEMENT_MAX, float8_codes
from qbench.formats.parse import build
from qbench.lazy import lazy_import
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


class KVFormat(ABC):
    """Base of the formats of keys and values. Subclasses are frozen dataclasses whose fields are plain YAML values."""

    name: ClassVar[str]
    calibrated: ClassVar[bool] = False  # needs two scales a layer, for keys and for values, found beforehand

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: float | None = None) -> Params:
        """The stored parts of `x`; `scale` is the layer's, for a calibrated format."""

    @abstractmethod
    def decode(self, parts: Params, scale: float | None = None) -> torch.Tensor:
        """Float32 ``[tokens, kv_heads, head_dim]``. Parts that are all zeros (a cache's empty pages) give zeros."""

    def scale(self, amax: float) -> float | None:
        """A layer's scale for keys or values up to `amax`; None for a format that needs none.

        Raises `QbenchError` where there is none: nothing but zeros was seen, or a value that is not finite.
        """
        return None

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raises `QbenchError` when heads of this size cannot be kept."""

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys and values in one layer."""
        parts = self.encode(torch.zeros(1, kv_heads, head_dim), 1.0)
        return 2 * sum(part.nbytes for part in parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class FP8KV(KVFormat):
    """8-bit floats E4M3 under one calibrated scale a layer, amax / 448, for keys and for values apart."""

    name: ClassVar[str] = "fp8"
    calibrated: ClassVar[bool] = True

    def scale(self, amax: float) -> float:
        if not 0 < amax < float("inf"):
            raise QbenchError(f"the largest magnitude is {amax}; a scale needs a finite one above 0.")
        return float(torch.tensor(amax, dtype=torch.float32) / ELEMENT_MAX["e4m3"])

    def check(self, head_dim: int) -> None:
        """Any size will do."""

    def encode(self, x: torch.Tensor, scale: float | None = None) -> Params:
        """`codes`: the floats' bits in uint8. Beyond the calibrated amax values saturate."""
        assert scale is not None
        return {"codes": float8_codes(x.float() / scale, "e4m3").view(torch.uint8)}

    def decode(self, parts: Params, scale: float | None = None) -> torch.Tensor:
        assert scale is not None
        codes = parts["codes"]
        # Looked up: a processor casts float8 one by one, ten times slower.
        table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float() * scale
        return table.index_select(0, codes.flatten().int()).view(codes.shape)


@dataclass(frozen=True)
class IntegerKV(KVFormat):
    """Integers with a float16 scale for each token, head and group of `group_size` channels (None: the whole head).

    Symmetric: ``scale = absmax / (2**(bits-1) - 1)``, codes are signed values plus ``2**(bits-1)``. Otherwise the range
    is that of the group, which need not hold 0: ``value = minimum + code * scale``, minimum in float16 too. With groups
    of 32 these are the parameters of GGUF's Q8_0 and Q4_1; codes are chosen under them as they are rounded. Codes of 4
    bits lie two a byte, the even channel in the low nibble. Magnitudes beyond float16's 65504 become infinite.
    """

    bits: ClassVar[int]

    group_size: int | None
    symmetric: bool

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 2:
            raise QbenchError(f"KV-cache format {self.name}: group_size is {self.group_size}; allowed: 2 or more.")

    def check(self, head_dim: int) -> None:
        group = self.group_size or head_dim
        if head_dim % group:
            allowed = [n for n in range(2, head_dim + 1) if head_dim % n == 0]
            raise QbenchError(
                f"KV-cache format {self.name}: group_size is {group}, heads have {head_dim} channels; "
                f"allowed: {', '.join(map(str, allowed))}."
            )

    def encode(self, x: torch.Tensor, scale: float | None = None) -> Params:
        """`codes` uint8 ``[tokens, kv_heads, head_dim * bits / 8]``; `scale`, and `minimum` where it is not symmetric,
        float16 ``[tokens, kv_heads, groups]``."""
        grouped = x.float().reshape(*x.shape[:-1], -1, self.group_size or x.shape[-1])
        largest_code = (1 << self.bits) - 1
        if self.symmetric:
            steps = (grouped.abs().amax(-1, keepdim=True) / (largest_code // 2)).half()
            parts, zero = {}, 1 << (self.bits - 1)
            offset: torch.Tensor | float = 0.0
        else:
            minimum = grouped.amin(-1, keepdim=True)
            steps = ((grouped.amax(-1, keepdim=True) - minimum) / largest_code).half()
            parts, zero = {"minimum": minimum.squeeze(-1).half()}, 0
            offset = minimum.half().float()
        divisor = torch.where(steps == 0, 1.0, steps.float())
        codes = ((grouped - offset) / divisor).round().add_(zero).clamp_(0, largest_code).to(torch.uint8).flatten(-2)
        if self.bits == 4:
            codes = codes[..., 0::2] | codes[..., 1::2] << 4
        return {"codes": codes, "scale": steps.squeeze(-1), **parts}

    def decode(self, parts: Params, scale: float | None = None) -> torch.Tensor:
        codes = parts["codes"]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        steps = parts["scale"].float().unsqueeze(-1)
        grouped = codes.float().view(*steps.shape[:-1], -1)
        if self.symmetric:
            return grouped.sub_(1 << (self.bits - 1)).mul_(steps).flatten(-2)
        return grouped.mul_(steps).add_(parts["minimum"].unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Int8KV(IntegerKV):
    """8-bit integers, a float16 scale for each token, head and group of channels; symmetric, as in vLLM."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    group_size: int | None = None
    symmetric: bool = True


@dataclass(frozen=True)
class Int4KV(IntegerKV):
    """4-bit integers, a float16 scale and minimum for each token, head and 32 channels; KIVI's scheme for values."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    group_size: int | None = 32
    symmetric: bool = False


@dataclass(frozen=True)
class KVCache:
    """What a model says of its key-value cache: the format, and for a calibrated one each layer's two scales."""

    format: KVFormat
    scales: tuple[tuple[float, float], ...] = ()  # of keys and values, by layer

    def check(self, num_layers: int, head_dim: int) -> None:
        """Raises `QbenchError` when heads cannot be kept in the format, or a layer has no scales."""
        self.format.check(head_dim)
        if self.format.calibrated and len(self.scales) != num_layers:
            raise QbenchError(
                f"KV-cache format {self.format.name}: {len(self.scales)} of {num_layers} layers have calibrated "
                "scales; each needs its own. A variant with this kv_cache is calibrated when it is compressed."
            )

    def layer_scales(self, layer: int) -> tuple[float, float] | tuple[None, None]:
        """The scales of a layer's keys and values; None for formats that need none."""
        return self.scales[layer] if self.format.calibrated else (None, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``{"format": {...}, "scales": {"0": [keys, values], ...}}``."""
        return {"format": self.format.to_dict(), "scales": {str(i): list(pair) for i, pair in enumerate(self.scales)}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVCache:
        """The inverse of `to_dict`. Raises `QbenchError` on an unknown format, or a scale that is missing or not above
        0."""
        scales = []
        for layer in range(len(fields["scales"])):
            pair = fields["scales"].get(str(layer), ())
            if len(pair) != 2 or not all(isinstance(s, float) and 0 < s < float("inf") for s in pair):
                raise QbenchError(f"kv_cache: the scales of layer {layer} are {list(pair)}; expected two above 0.")
            scales.append((pair[0], pair[1]))
        return cls(kv_format_from_dict(fields["format"]), tuple(scales))


KV_FORMATS = Registry(
    "KV-cache format",
    {
        "fp8": "qbench.formats.kv_cache:FP8KV",
        "int8": "qbench.formats.kv_cache:Int8KV",
        "int4": "qbench.formats.kv_cache:Int4KV",
    },
)


def kv_format_from_dict(fields: dict[str, Any]) -> KVFormat:
    """The inverse of `KVFormat.to_dict`. Raises `QbenchError` on an unknown name, key or value."""
    format: KVFormat = build(KV_FORMATS, fields)
    return format
