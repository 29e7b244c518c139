"""What other tools made of the same weights: the files in golden/, and how to compare with them."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file


@cache
def golden(tool: str) -> dict[str, torch.Tensor]:
    return load_file(Path(__file__).parent / "golden" / f"{tool}.safetensors")


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return packed >> 4 | packed << 4


def same_float8(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bytes, except that one may have lost the sign of a zero."""
    unsigned = (ours.view(torch.uint8) & 127 == 0) & (theirs.view(torch.uint8) & 127 == 0)
    return bool(((ours.view(torch.uint8) == theirs.view(torch.uint8)) | unsigned).all())
