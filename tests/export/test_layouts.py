"""The comparison of an export with its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from qbench.errors import QbenchError
from qbench.export.layouts import CHECKS, LAYOUTS, verify
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, TensorInfo


class Memory(ModelSource):
    """Tensors held in memory."""

    location = "memory"
    revision = "1"

    def __init__(self, **held: torch.Tensor | QuantizedTensor) -> None:
        self.held = held

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), "F32", 0) for name, tensor in self.held.items()}

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        return self.held[name]

    def write_side_files(self, folder: Path) -> list[str]:
        return []


WEIGHT = torch.linspace(-1, 1, 128).reshape(4, 32)


def test_values_are_compared_however_they_are_stored() -> None:
    quantized = Integer(bits=4, group_size=32).quantize(WEIGHT)
    found = verify(Memory(w=quantized, n=WEIGHT), Memory(w=quantized.dequantize(), n=WEIGHT.clone()))
    assert (found.max_abs_difference, found.worst_tensor, found.quantized_difference) == (0.0, None, 0.0)


def test_the_largest_difference_and_where_it_is() -> None:
    quantized = Integer(bits=4, group_size=32).quantize(WEIGHT)
    source = Memory(a=WEIGHT, b=WEIGHT, q=quantized)
    found = verify(source, Memory(a=WEIGHT + 0.25, b=WEIGHT - 0.5, q=quantized.dequantize() + 0.125))
    assert (found.max_abs_difference, found.worst_tensor) == (pytest.approx(0.5), "b")
    assert found.quantized_difference == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("exported", "message"),
    [
        (Memory(), r"1 tensors missing \(\['w'\]\)"),
        (Memory(w=WEIGHT, x=WEIGHT), r"1 that the model does not have \(\['x'\]\)"),
        (Memory(w=WEIGHT.T), r"w reads back as \[32, 4\], not \[4, 32\]"),
        (Memory(w=WEIGHT / 0), "infinite or undefined"),
        (Memory(w=WEIGHT * float("nan")), "infinite or undefined"),
    ],
)
def test_what_no_export_may_do(exported: Memory, message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        verify(Memory(w=WEIGHT), exported)


def test_every_layout_can_be_written_and_checked() -> None:
    assert LAYOUTS.names() == CHECKS.names()
    for name in LAYOUTS.names():
        assert callable(LAYOUTS.get(name)) and callable(CHECKS.get(name))
