"""What an export did, said in numbers: what was written and how it compares with the model it was made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExportReport:
    """The outcome of one export, filled after the files were read back."""

    layout: str  # "gguf", "gptq", ...
    files: list[Path]  # every file written
    nbytes: int  # the sum of their sizes
    tensor_types: dict[str, int]  # stored type ("Q4_0", "F16", "gptq-int4", ...) -> number of tensors
    bits_per_weight: float  # 8 * bytes of the weight files / logical weights
    max_abs_difference: float  # largest |read back - source dequantized| over all tensors
    worst_tensor: str | None  # where that is; None when nothing differs
    quantized_max_abs_difference: float  # the same over the tensors that the source holds quantized
    notes: list[str] = field(default_factory=list)  # how it is stored, where that is not as asked; a sentence each
    warnings: list[str] = field(default_factory=list)  # what an engine that loads it may do wrong; a sentence each

    @property
    def exact(self) -> bool:
        """Every tensor reads back as the values the source stands for."""
        return self.max_abs_difference == 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "files": [str(file) for file in self.files], "exact": self.exact}
