import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qbench.formats.bitpack import pack_bits, packed_width, unpack_bits


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_is_numpys_little_endian_bit_stream(bits: int, out: int, width: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (out, width), dtype=np.uint8)
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits].reshape(out, -1)
    expected = np.packbits(stream, axis=1, bitorder="little")
    packed = pack_bits(torch.from_numpy(codes), bits)
    assert packed.shape == (out, packed_width(width, bits))
    assert np.array_equal(packed.numpy(), expected)
    assert np.array_equal(unpack_bits(packed, bits, width).numpy(), codes)


@pytest.mark.trap(4)
def test_fifteen_4_bit_codes_take_8_bytes() -> None:
    assert pack_bits(torch.arange(15, dtype=torch.uint8).view(1, 15), 4).tolist() == [
        [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0x0E]
    ]
