"""Block encoders and decoders, bit for bit against gguf-py."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from qbench.formats.gguf_blocks import BLOCK_BYTES, DECODERS, ENCODERS, round_half_away

TYPES = sorted(ENCODERS)


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


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_same_bytes_as_gguf(kind: str, seed: int) -> None:
    weight = weights(seed)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    encoded = ENCODERS[kind](weight)
    assert encoded.shape == (128, 4 * BLOCK_BYTES[kind])
    np.testing.assert_array_equal(encoded.numpy(), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_any_bytes_decode_as_gguf_does(kind: str) -> None:
    data = torch.randint(
        0, 256, (50, 4 * BLOCK_BYTES[kind]), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    with np.errstate(invalid="ignore"):  # some scales are infinite or undefined
        expected = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(DECODERS[kind](data).numpy(), expected)


@pytest.mark.trap(38)
def test_halves_round_away_from_zero() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    values = torch.tensor([0.5, 2.5, -0.5, below_half, -below_half, 126.5])
    assert round_half_away(values).tolist() == [1, 3, -1, 0, 0, 127]
    row = torch.zeros(1, 32)
    row[0, :5] = torch.tensor([127, 0.5, 2.5, -0.5, below_half])  # scale 1
    assert ENCODERS["Q8_0"](row)[0, 2:7].view(torch.int8).tolist() == [127, 1, 3, -1, 0]
