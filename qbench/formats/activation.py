"""How the inputs of a linear are rounded while the model runs: the `ActivationFormat` contract.

An activation ``x`` ``[tokens, in]`` is rounded token by token, so what a token becomes does not depend on which others
are computed beside it (LLM.int8's outlier columns are the exception its paper makes). Scales are found on the fly from
each token, or are static: one number for the layer, from the largest magnitude that calibration saw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QbenchError
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch

INPUT_SCALE = "input_scale"  # the part of a `QuantizedTensor` that holds a static scale, float32 [1, 1]


class ActivationFormat(ABC):
    """Base of every activation format. Subclasses are frozen dataclasses whose fields are plain YAML values."""

    name: ClassVar[str]

    @property
    def static(self) -> bool:
        """Whether there is a scale that calibration must find."""
        return False

    def input_scale(self, absmax: torch.Tensor) -> torch.Tensor:
        """The static scale, float32 ``[1, 1]``, for inputs whose largest magnitude was `absmax` > 0 (one number)."""
        raise NotImplementedError(f"{self.name} has no static scale")

    @abstractmethod
    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        """What the product sees instead of `x` ``[tokens, in]``, in the dtype of `x`.

        `input_scale` float32 ``[1, 1]`` is given where the format is `static`.
        """

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


ACTIVATIONS = Registry(
    "activation format",
    {
        "int8": "qbench.formats.activation_int8:Int8Inputs",
        "llm-int8": "qbench.formats.activation_int8:LLMInt8",
        "fp8": "qbench.formats.activation_float:FP8Inputs",
        "mxfp8": "qbench.formats.activation_float:MXFP8Inputs",
        "nvfp4": "qbench.formats.activation_float:NVFP4Inputs",
    },
)


def activation_from_dict(fields: dict[str, Any]) -> ActivationFormat:
    """The inverse of `ActivationFormat.to_dict`. Raises `QbenchError` on an unknown name, key or value."""
    from qbench.formats.parse import build

    activation: ActivationFormat = build(ACTIVATIONS, fields)
    return activation


def static_scale(absmax: torch.Tensor, largest: float) -> torch.Tensor:
    """``absmax / largest`` as float32 ``[1, 1]``. Raises `QbenchError` unless it is finite and above 0."""
    import torch

    scale = (absmax.float() / largest).view(1, 1)
    if not bool(torch.isfinite(scale).all() & (scale > 0).all()):
        raise QbenchError(f"a static scale of {float(scale):.6g}: its calibration inputs are all zero, or not finite.")
    return scale
