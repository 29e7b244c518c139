"""Every kernel against the decoded weight multiplied in float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.base import Format, QuantizedTensor
from qbench.formats.codebook import FP4, NF4
from qbench.formats.float8 import FP8
from qbench.formats.fourbit import FourBit
from qbench.formats.integer import Integer
from qbench.formats.mx import MXFP4, MXFP8
from qbench.formats.nvfp4 import NVFP4
from qbench.kernels import codebook, dispatch, reference
from qbench.kernels.cpu import bags

CPU = torch.device("cpu")


def integer(bits: int, granularity: str, group_size: int | None = None, **fields: object) -> Integer:
    return Integer(bits=bits, granularity=granularity, group_size=group_size, **fields)  # type: ignore[arg-type]


FORMATS = [
    integer(8, "tensor"),
    integer(8, "channel"),
    integer(8, "channel", symmetric=False),
    integer(8, "tensor", symmetric=False),
    integer(8, "group", 32, symmetric=False),
    integer(8, "channel", full_range=False, scale_dtype="float32"),
    integer(4, "channel"),
    integer(4, "group", 32),
    integer(4, "group", 32, symmetric=False),
    integer(4, "group", 40),  # 96 columns: groups of 40, 40 and 16
    integer(4, "group", 40, symmetric=False),
    integer(2, "group", 16, symmetric=False),
    integer(2, "channel"),
    integer(4, "group", 32, symmetric=False, zero_point_dtype="float16"),
    integer(4, "group", 40, symmetric=False, zero_point_dtype="float16"),
    integer(8, "channel", symmetric=False, zero_point_dtype="float32", scale_dtype="float32"),
    integer(2, "tensor", symmetric=False, zero_point_dtype="float16"),
    integer(3, "group", 32, symmetric=False, zero_point_dtype="float16"),
    integer(3, "group", 32),
    integer(5, "channel", symmetric=False),
    NF4(group_size=32),
    NF4(group_size=40),
    FP8(granularity="channel"),
    FP8(granularity="tensor"),
    FP8(granularity="block"),
    FP8(granularity="channel", element="e5m2"),
    FP4(group_size=32, double_quant=True),
    NF4(group_size=40, double_quant=True),
    MXFP4(),
    MXFP8(),
    MXFP8(element="e5m2"),
    NVFP4(),
]


def weight_and_input(format: Format, rows: int, out: int = 24, width: int = 96) -> tuple[QuantizedTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out, width, generator=generator) * torch.rand(out, 1, generator=generator) + 0.1
    return format.quantize(weight), torch.randn(rows, width, generator=generator)


def shuffled_groups(format: Integer, rows: int) -> tuple[QuantizedTensor, torch.Tensor]:
    """A weight whose columns belong to groups in mixed order, as act-order with dynamic groups gives."""
    weight, x = weight_and_input(format, rows)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    g_idx = torch.empty(96, dtype=torch.int32)
    g_idx[order] = torch.arange(96, dtype=torch.int32) // format.block_size(96)
    codes, params = format.unpack(weight.parts, weight.shape)
    return format.pack(codes, params, g_idx), x


def assert_linear_is_exact(weight: QuantizedTensor, x: torch.Tensor) -> Counter[str]:
    bias = torch.linspace(-1, 1, weight.shape[0])
    ran: Counter[str] = Counter()
    prepared = dispatch.prepare(weight, torch.float32, CPU)
    for b in (None, bias):
        found = dispatch.linear(x, prepared, b, ran)
        exact = x.double() @ weight.dequantize().double().T + (0 if b is None else b.double())
        # the sum of |x||w| bounds what float32 rounding may do to a product
        bound = x.abs().double() @ weight.dequantize().abs().double().T + 1
        assert found.dtype == torch.float32
        assert ((found - exact).abs() / bound).max() < 2e-6
        torch.testing.assert_close(reference.linear(x, weight, b).double(), exact, rtol=1e-5, atol=1e-5)
    return ran


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_format_multiplies_as_its_decoded_weight(format: Format, rows: int) -> None:
    assert_linear_is_exact(*weight_and_input(format, rows))


@pytest.mark.trap(21)
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 40), (8, 32), (3, 32)])
def test_columns_in_mixed_groups(bits: int, group_size: int, symmetric: bool, rows: int) -> None:
    assert_linear_is_exact(*shuffled_groups(integer(bits, "group", group_size, symmetric=symmetric), rows))


@pytest.mark.parametrize(
    ("format", "few", "many"),
    [
        (integer(8, "channel"), "int8_bag_f32", "int8_dequant_f32"),
        (integer(4, "group", 32), "int4_bag_f32", "int4_dequant_f32"),
        (NF4(), "nf4_dequant_f32", "nf4_dequant_f32"),
        (FP8(), "fp8_dequant_f32", "fp8_dequant_f32"),
        (MXFP8(), "mxfp8_dequant_f32", "mxfp8_dequant_f32"),
        (NVFP4(), "nvfp4_dequant_f32", "nvfp4_dequant_f32"),
        (integer(3, "channel"), "reference", "reference"),
    ],
    ids=str,
)
def test_the_record_says_which_kernel_ran(format: Format, few: str, many: str) -> None:
    assert assert_linear_is_exact(*weight_and_input(format, 1)) == {few: 2}
    assert assert_linear_is_exact(*weight_and_input(format, 64)) == {many: 2}


@pytest.mark.parametrize("group_size", [16, 40])
def test_a_few_columns_at_a_time(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bags, "DENSE_CHUNK", 24 * 40)  # 40 columns, or 32: two groups
    assert_linear_is_exact(*weight_and_input(integer(4, "group", group_size, symmetric=False), 20))
    assert_linear_is_exact(*weight_and_input(integer(8, "channel", symmetric=False), 20))


def test_an_odd_number_of_outputs_cannot_be_packed_by_column_and_takes_the_reference() -> None:
    assert assert_linear_is_exact(*weight_and_input(integer(4, "channel"), 2, out=23)) == {"reference": 2}


def test_an_odd_number_of_inputs() -> None:
    for format in (integer(4, "group", 32), NF4(group_size=32), integer(8, "channel")):
        assert_linear_is_exact(*weight_and_input(format, 2, width=95))


def test_dense_weights_are_cast_and_counted() -> None:
    ran: Counter[str] = Counter()
    weight, x = torch.randn(24, 96, dtype=torch.float64), torch.randn(5, 96)
    prepared = dispatch.prepare(weight, torch.float32, CPU)
    assert prepared.shape == weight.shape
    torch.testing.assert_close(dispatch.linear(x, prepared, None, ran), x @ weight.float().T)
    assert ran == {"dense_f32": 1}


@pytest.mark.parametrize(
    "format", [integer(4, "group", 32), integer(8, "channel"), NF4(), FP8(), integer(3, "channel")]
)
def test_bfloat16_activations_keep_their_dtype(format: Format) -> None:
    weight, x = weight_and_input(format, 3)
    prepared = dispatch.prepare(weight, torch.bfloat16, CPU)
    found = dispatch.linear(x.bfloat16(), prepared, torch.ones(24, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), reference.linear(x, weight) + 1, rtol=0.05, atol=0.2)


def test_memory_stays_at_the_stored_size() -> None:
    for format in (integer(4, "group", 32, symmetric=False), integer(8, "channel"), NF4(), FP8()):
        weight, _ = weight_and_input(format, 1, out=256, width=256)
        assert dispatch.prepare(weight, torch.float32, CPU).nbytes < 1.1 * weight.nbytes


@pytest.mark.parametrize(
    "format", [NF4(group_size=32), FP4(double_quant=True), MXFP4(), NVFP4(), MXFP8(), FP8(granularity="block")], ids=str
)
@pytest.mark.parametrize("width", [96, 144, 256])
def test_quick_decoders_equal_the_format_to_the_bit(format: Format, width: int) -> None:
    weight, _ = weight_and_input(format, 1, out=136, width=width)
    decode = codebook.fourbit_decode if isinstance(format, FourBit) else codebook.float8_decode
    assert torch.equal(decode(weight), weight.dequantize())


def test_all_254_finite_e4m3_bytes_decode_exactly() -> None:
    codes = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codebook.e4m3_over_256(codes).float() * 256, codes.float())


def test_nan_codes_are_refused() -> None:
    for format, part in ((FP8(), "codes"), (NVFP4(), "scale")):
        weight, _ = weight_and_input(format, 1)
        weight.parts[part].view(torch.uint8)[3, 5] = 0x7F
        with pytest.raises(QbenchError, match="NaN"):
            dispatch.prepare(weight, torch.float32, CPU)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("format", [NF4(group_size=32), NF4(group_size=40), FP8(), FP8(granularity="block")], ids=str)
def test_a_few_rows_at_a_time(format: Format, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook, "CHUNK", 96 * 10)  # 24 rows: 10, 10 and 4
    assert_linear_is_exact(*weight_and_input(format, rows))
