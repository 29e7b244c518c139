import pytest
import torch

from qbench.formats.base import FORMATS, Format
from qbench.formats.codebook import NF4
from qbench.formats.float8 import FP8
from qbench.formats.nvfp4 import NVFP4
from qbench.formats.size import stored_bytes

SPECIAL = [NF4(double_quant=True), NF4(group_size=100, double_quant=True), FP8("tensor"), FP8("block"), NVFP4()]


@pytest.mark.parametrize("format", [*SPECIAL, *(FORMATS.get(name)() for name in FORMATS.names())], ids=str)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (130, 256), (300, 768)])
def test_the_size_is_known_before_any_weight(format: Format, shape: tuple[int, int]) -> None:
    assert stored_bytes(format, shape) == format.quantize(torch.ones(shape)).nbytes
