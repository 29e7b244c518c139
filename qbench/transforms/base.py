"""What equivalent change is made to a model before its weights are rounded.

A linear's input channels may be multiplied by ``s`` if whatever produces them is divided by ``s``: the function stays,
but the weights become easier to round. A transform only chooses `s` for one group of linears that read the same tensor;
`qbench.compress.smoothing` finds the groups, checks that the change is one of form only, and makes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.formats.base import Format
from qbench.lazy import lazy_import
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

LARGEST = 65504.0  # of float16, which files store what is not quantized in
CLIP_RANGES = 10  # that `qbench.transforms.clipping` tries for each block


@dataclass(frozen=True)
class Readers:
    """The linears that read one tensor of ``n`` channels, as a transform sees them. All tensors float32."""

    mean_abs: torch.Tensor  # [n], mean |x| over the calibration tokens
    max_abs: torch.Tensor  # [n]
    weights: list[torch.Tensor]  # [out, n] each
    block_size: int  # columns that share parameters in the readers' format
    largest_produced: torch.Tensor  # [n], largest |weight or bias| that makes each channel, and is divided by s
    loss: Callable[[torch.Tensor], float]  # s -> mean squared error of the output with the readers' weights rounded

    def usable(self, scales: torch.Tensor) -> bool:
        """Whether `scales` ``[n]`` are finite and above 0 and everything they are folded into fits float16."""
        if not bool((torch.isfinite(scales) & (scales > 0)).all()):
            return False
        read = max(float((weight.abs().amax(0) * scales).max()) for weight in self.weights)
        return max(read, float((self.largest_produced / scales).max())) <= LARGEST


@dataclass(frozen=True)
class Choice:
    """The scales of a group ``[n]``, and how they came about as plain values for the report."""

    scales: torch.Tensor
    detail: dict[str, Any]


def best(readers: Readers, candidates: list[Choice]) -> Choice | None:
    """The usable candidate of least loss, the first of equals, with its loss noted; None when none is usable."""
    found: Choice | None = None
    least = float("inf")
    for candidate in candidates:
        if readers.usable(candidate.scales) and (loss := readers.loss(candidate.scales)) < least:
            found, least = Choice(candidate.scales, {**candidate.detail, "loss": loss}), loss
    return found


class Transform(ABC):
    """Base of every transform. Subclasses are frozen dataclasses whose fields are plain YAML values."""

    name: ClassVar[str]
    divides_linears: ClassVar[bool]  # whether channels made by a linear are scaled too, or only those of a norm

    @property
    @abstractmethod
    def candidates(self) -> int:
        """How many times a linear's weight is rounded to compare its error."""

    @abstractmethod
    def choose(self, readers: Readers) -> Choice | None:
        """Scales for one group, usable ones; None when there are none."""

    def clips(self, module: str, format: Format) -> bool:
        """Whether the ranges of the linear `module` (its dotted name) are narrowed after its weight was scaled."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


ROTATION = "Hadamard rotations of the residual stream and of heads, folded into the weights (QuaRot, arXiv 2404.00456)."

TRANSFORMS = Registry(
    "transform",
    {
        "awq": "qbench.transforms.awq:AWQ",
        "smoothquant": "qbench.transforms.smoothquant:SmoothQuant",
    },
    elsewhere=dict.fromkeys(
        ("hadamard", "quarot", "rotate", "rotation"),
        "A rotation is of the whole model: `rotate: true` in the variant asks for it.",
    ),
)
