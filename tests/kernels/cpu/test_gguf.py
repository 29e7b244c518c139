"""GGUF's block types on a processor against the decoded weight multiplied in float64."""

from __future__ import annotations

import pytest
import torch

from qbench.formats.base import FORMATS, Format
from qbench.formats.gguf_blocks import KINDS
from qbench.kernels import dispatch
from qbench.kernels.cpu import gguf
from tests.kernels.test_linear import CPU, assert_linear_is_exact, weight_and_input


def format_of(kind: str) -> Format:
    found: Format = FORMATS.get(kind.lower())()
    return found


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_block_type_multiplies_as_its_decoded_weight(kind: str, rows: int) -> None:
    format = format_of(kind)
    ran = assert_linear_is_exact(*weight_and_input(format, rows, width=512))
    assert ran == {f"{format.name}_{'dequant' if rows == 20 else 'bag'}_f32": 2}


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("kind", ["Q5_0", "Q3_K", "Q6_K", "Q4_1"])
def test_a_few_columns_at_a_time(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "UPPER_CHUNK", 24 * 200)  # 192 columns, then 192, then 128
    monkeypatch.setattr(gguf, "DENSE_CHUNK", 24 * 100)  # 96 columns
    assert_linear_is_exact(*weight_and_input(format_of(kind), rows, width=512))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_near_the_stored_size(kind: str) -> None:
    weight, _ = weight_and_input(format_of(kind), 1, out=256, width=256)
    assert dispatch.prepare(weight, torch.float32, CPU).nbytes < 1.1 * weight.nbytes


def test_rows_that_do_not_fill_bytes_take_the_reference() -> None:
    assert assert_linear_is_exact(*weight_and_input(format_of("Q4_0"), 2, out=22)) == {"reference": 2}


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_bfloat16_activations_keep_their_dtype(kind: str) -> None:
    weight, x = weight_and_input(format_of(kind), 3, width=256)
    found = dispatch.linear(x.bfloat16(), dispatch.prepare(weight, torch.bfloat16, CPU))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), x @ weight.dequantize().T, rtol=0.05, atol=0.2)
