"""The layouts a compressed model can be exported to, and the comparison every export must pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.lazy import lazy_import
from qbench.models.source import ModelSource
from qbench.progress import progress_bar
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

LAYOUTS = Registry(
    "export layout",
    {
        "gptq": "qbench.export.gptq:write",
        "gguf": "qbench.export.gguf:write",
    },
)
CHECKS = Registry(
    "export layout",
    {
        "gptq": "qbench.export.gptq:check",
        "gguf": "qbench.export.gguf:check",
    },
)


@dataclass(frozen=True)
class Readback:
    """How an exported model differs from its source: values only, however each side stores them."""

    max_abs_difference: float
    worst_tensor: str | None  # None when nothing differs
    quantized_difference: float  # the largest among tensors that the source holds quantized


def verify(source: ModelSource, exported: ModelSource) -> Readback:
    """Compares every tensor of `exported`, dequantized, with the one of `source`, one at a time, in float32.

    Raises `QbenchError` when a tensor is missing, extra or of another shape, or when the difference is not finite.
    """
    names, found = set(source.tensors), set(exported.tensors)
    if names != found:
        missing, extra = sorted(names - found), sorted(found - names)
        raise QbenchError(f"{exported.location}: reads back with {len(missing)} tensors missing ({missing[:3]}) "
                          f"and {len(extra)} that the model does not have ({extra[:3]}).")  # fmt: skip
    worst: tuple[float, str | None] = (0.0, None)
    worst_quantized = 0.0
    for name in tracked(sorted(names), "Reading back"):
        loaded = source.load(name)
        ours, theirs = _values(loaded), _values(exported.load(name))
        if ours.shape != theirs.shape:
            raise QbenchError(
                f"{exported.location}: {name} reads back as {list(theirs.shape)}, not {list(ours.shape)}."
            )
        if torch.equal(ours, theirs):
            continue
        difference = float((ours - theirs).abs().max())
        if not difference < float("inf"):
            raise QbenchError(f"{exported.location}: {name} reads back with infinite or undefined values.")
        if difference > worst[0]:
            worst = (difference, name)
        if isinstance(loaded, QuantizedTensor):
            worst_quantized = max(worst_quantized, difference)
    return Readback(*worst, worst_quantized)


def tracked(names: Collection[str], description: str) -> Iterator[str]:
    """`names` one by one, behind a progress bar."""
    with progress_bar(description, len(names)) as task:
        for name in names:
            yield name
            task.advance()


def _values(tensor: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()
