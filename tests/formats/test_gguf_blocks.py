"""GGUF block types, bit for bit against llama.cpp (golden files made by its own library) and gguf-py."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.formats.gguf_blocks import KINDS, GGUFBlocks, decode, encode, round_half_away
from tests.formats.golden.make_gguf_blocks import FILE

GOLDEN = {key: torch.from_numpy(value) for key, value in np.load(FILE).items()}
LEGACY = [kind for kind in KINDS if not kind.endswith("K")]


def format_of(kind: str) -> GGUFBlocks:
    found: GGUFBlocks = FORMATS.get(kind.lower())()
    return found


def weights(seed: int) -> torch.Tensor:
    """Rows over eleven orders of magnitude, with zero blocks, constant blocks and exact halves."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 128, generator=generator) * torch.logspace(-9, 2, 64)[:, None]
    rows[3] = 0
    rows[5, :32] = 0
    rows[6, :32] = 1.5
    rows[7, 32:64] = -0.25
    halves = torch.randint(-254, 255, (64, 128), generator=generator) * 0.5
    halves[:, ::32] = 127
    return torch.cat([rows, halves])


@pytest.mark.trap(38)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bytes_as_llama_cpp(kind: str, weighted: bool) -> None:
    importance, key = (GOLDEN["real/importance"], f"real/{kind}/importance") if weighted else (None, f"real/{kind}")
    assert torch.equal(format_of(kind).quantize(GOLDEN["real"], importance).parts["blocks"], GOLDEN[key])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_as_llama_cpp(kind: str, weighted: bool) -> None:
    """The same but for codes that do not matter: where a sub-block's scale became 0, llama.cpp leaves those of its
    search and we write 0."""
    format, weight = format_of(kind), GOLDEN["hard"]
    importance, key = (GOLDEN["hard/importance"], f"hard/{kind}/importance") if weighted else (None, f"hard/{kind}")
    found = format.quantize(weight, importance)
    expected = QuantizedTensor(format, (10, 256), {"blocks": GOLDEN[key]})
    assert torch.equal(found.dequantize(), expected.dequantize())
    (codes, params), (other_codes, other_params) = (format.unpack(q.parts, q.shape) for q in (found, expected))
    for name, values in params.items():
        assert torch.equal(values, other_params[name])
    assert bool(((codes == other_codes) | (params["scale"] == 0)).all())


@pytest.mark.parametrize("kind", LEGACY)
@pytest.mark.parametrize("seed", range(3))
def test_same_bytes_as_gguf(kind: str, seed: int) -> None:
    weight = weights(seed)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(encode(kind, weight).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_decode_as_gguf_does(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (50, 4 * format_of(kind).nbytes), dtype=torch.uint8, generator=generator)
    with np.errstate(invalid="ignore"):  # some scales are infinite or undefined
        expected = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(decode(kind, data).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_at_a_time_as_a_solver_does(kind: str) -> None:
    format, weight = format_of(kind), GOLDEN["real"][:2, :256]
    shared, size = format.shared(weight), format.block_size(256)
    codes, params = [], []
    for start in range(0, 256, size):
        fitted = format.fit(weight[:, start : start + size], shared)
        params.append(fitted)
        for offset in range(size):
            spread = format.spread(fitted, offset, offset + 1)
            code = format.encode(weight[:, start + offset : start + offset + 1], spread)
            assert code.shape == format.decode(code, spread).shape == (2, 1)
            codes.append(code)
    packed = format.pack(torch.cat(codes, 1), {k: torch.cat([p[k] for p in params], 1) for k in params[0]})
    assert torch.equal(packed.parts["blocks"], format.quantize(weight).parts["blocks"])


@pytest.mark.parametrize("kind", KINDS)
def test_importance_lowers_the_weighted_error(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 512, generator=generator)
    importance = torch.rand(512, generator=generator) ** 6
    format = format_of(kind)

    def error(given: torch.Tensor | None) -> float:
        return float(((format.quantize(weight, given).dequantize() - weight) ** 2 * importance).sum())

    assert error(importance) <= error(None)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q2_K", 2.625), ("Q3_K", 3.4375), ("Q4_K", 4.5), ("Q5_K", 5.5), ("Q6_K", 6.5625), ("Q5_0", 5.5), ("Q5_1", 6.0)],
)
def test_bits_per_weight(kind: str, bits: float) -> None:
    assert format_of(kind).quantize(torch.ones(3, 512)).bits_per_weight == bits


@pytest.mark.trap(37)
def test_rows_that_no_super_block_divides() -> None:
    instead: dict[str, Any] = {name: FORMATS.get(name)().for_width(576) for name in FORMATS.names() if name[0] == "q"}
    assert {name: found.name for name, found in instead.items() if found.name != name} == {
        "q2_k": "q4_0",
        "q3_k": "q4_0",
        "q4_k": "q5_0",
        "q5_k": "q5_1",
        "q6_k": "q8_0",
    }
    for name, found in instead.items():
        assert FORMATS.get(name)().for_width(1536).name == name
        assert FORMATS.get(name)().for_width(72) is None
        native = FORMATS.get(name)().quantize(torch.ones(1, 1536)).bits_per_weight
        assert found.quantize(torch.ones(1, 576)).bits_per_weight >= native
    with pytest.raises(QbenchError, match="rows of 576 are no multiple of 256"):
        FORMATS.get("q4_k")().quantize(torch.ones(1, 576))


def test_a_scale_beyond_float16_is_refused() -> None:
    for kind in KINDS:
        with pytest.raises(QbenchError, match="does not fit float16"):
            format_of(kind).quantize(torch.full((1, 256), -1e9) * torch.linspace(-0.5, 1, 256))


@pytest.mark.trap(38)
def test_halves_round_away_from_zero() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    values = torch.tensor([0.5, 2.5, -0.5, below_half, -below_half, 126.5])
    assert round_half_away(values).tolist() == [1, 3, -1, 0, 0, 127]
    row = torch.zeros(1, 32)
    row[0, :5] = torch.tensor([127, 0.5, 2.5, -0.5, below_half])  # scale 1
    assert encode("Q8_0", row)[0, 2:7].view(torch.int8).tolist() == [127, 1, 3, -1, 0]
