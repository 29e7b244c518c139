"""8-bit integer activations: symmetric, ``code = round(x / scale)`` in -127..127, with integer products.

`LLMInt8` is LLM.int8() (Dettmers et al., arXiv 2208.07339): columns that hold a value of at least `threshold` leave the
integers and are multiplied in the activation's own precision; the others are rounded as `Int8Inputs` does, each token
by its largest magnitude among the values below the threshold. Its columns are found over all tokens that are computed
together, as in the paper and in bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.activation import ActivationFormat, static_scale
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

LARGEST = 127.0


@dataclass(frozen=True)
class Int8Inputs(ActivationFormat):
    """One scale a token, found on the fly, or one static scale for the layer's input (`granularity: tensor`)."""

    name: ClassVar[str] = "int8"

    granularity: Literal["token", "tensor"] = "token"

    @property
    def static(self) -> bool:
        return self.granularity == "tensor"

    def input_scale(self, absmax: torch.Tensor) -> torch.Tensor:
        return static_scale(absmax, LARGEST)

    def codes(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Int8 codes ``[tokens, in]`` and float32 scales, ``[tokens, 1]`` or the static ``[1, 1]``."""
        x = x.float()
        if input_scale is None:
            return token_codes(x)
        return (x / input_scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), input_scale

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        codes, scale = self.codes(x, input_scale)
        return (codes * scale).to(x.dtype)


@dataclass(frozen=True)
class LLMInt8(ActivationFormat):
    """Int8 a token, but columns with a magnitude of at least `threshold` are not rounded."""

    name: ClassVar[str] = "llm-int8"

    threshold: float = 6.0

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise QbenchError(f"activation format llm-int8: threshold is {self.threshold}; allowed: above 0.")

    def outliers(self, x: torch.Tensor) -> torch.Tensor:
        """Indices of the columns of `x` ``[tokens, in]`` that are not rounded, ascending."""
        return (x.abs() >= self.threshold).any(0).nonzero().flatten()

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Int8 codes ``[tokens, in]``, 0 in outlier columns; float32 scales ``[tokens, 1]``; outlier columns."""
        columns = self.outliers(x)
        below = x.float()
        if len(columns):
            below = below.masked_fill(below.abs() >= self.threshold, 0)
        codes, scale = token_codes(below)
        codes[:, columns] = 0
        return codes, scale, columns

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        codes, scale, columns = self.codes(x)
        rounded = (codes * scale).to(x.dtype)
        rounded[:, columns] = x[:, columns]
        return rounded


def token_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 codes of float32 `x` ``[tokens, in]`` and each token's scale ``[tokens, 1]``, its largest magnitude / 127.

    The codes come from a product with the inverse scale, as in bitsandbytes and vLLM. A token of zeros has scale 1.
    """
    absmax = x.abs().amax(1, keepdim=True)
    absmax = torch.where(absmax == 0, LARGEST, absmax)
    return (x * (LARGEST / absmax)).round_().to(torch.int8), absmax / LARGEST
