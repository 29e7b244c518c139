"""The GGUF header parser: what gguf-py reads, and that nothing hostile gets further than one message."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from qbench.errors import QbenchError
from qbench.models.gguf_file import read_gguf
from tests.models.gguf_bytes import ARRAY, INT32, STRING, UINT16, UINT32, UINT64, pair, tensor, text, write

HUGE = 2**63


def test_everything_gguf_py_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -5)
    writer.add_uint64("a.u64", 2**60)
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße\n")
    writer.add_array("a.words", ["", "x", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    weight = np.arange(64 * 3, dtype=np.float32).reshape(3, 64)
    writer.add_tensor("w", weight)
    writer.add_tensor("b", weight[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    metadata = file.metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["a.u8"], metadata["a.i16"], metadata["a.u64"]) == (200, -5, 2**60)
    assert (metadata["a.f32"], metadata["a.f64"], metadata["a.bool"]) == (1e-5, 0.1, True)
    assert metadata["a.text"] == "grüße\n"
    assert metadata["a.words"] == ["", "x", "日本"]
    assert metadata["a.numbers"].tolist() == [1, -2, 3]
    assert file.tensors["w"].shape == (3, 64)
    assert file.tensors["w"].type == "F32"
    np.testing.assert_array_equal(file.tensors["w"].read().view(np.float32).reshape(3, 64), weight)
    np.testing.assert_array_equal(file.tensors["b"].read().view(np.float16), weight[0].astype(np.float16))


HOSTILE = {
    "magic": ({"magic": b"GGML"}, "GGML"),
    "version 1": ({"version": 1}, "version 1"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "tensor count": ({"num_tensors": HUGE}, "tensor count"),
    "metadata count": ({"num_pairs": HUGE}, "metadata count"),
    "metadata count beyond the file": ({"num_pairs": 7, "pairs": [pair("a", UINT32, 1)]}, "metadata count is 7"),
    "key length": ({"pairs": [struct.pack("<Q", HUGE) + b"abc" + bytes(20)]}, "length of metadata key"),
    "string length": ({"pairs": [pair("a", STRING, struct.pack("<Q", HUGE))]}, "length of a"),
    "not text": ({"pairs": [pair("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]}, "UTF-8"),
    "value type": ({"pairs": [pair("a", 77, b"1234")]}, "unknown value type 77"),
    "array length": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", INT32, HUGE))]}, "length of array a"),
    "text array length": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", STRING, HUGE))]}, "length of array a"),
    "nested array": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 500)]}, "element type 9"),
    "key twice": ({"pairs": [pair("a", UINT32, 1)] * 2}, "'a' appears twice"),
    "a million dimensions": ({"tensors": [tensor("w", [1], 0, 0, num_dims=10**6)]}, "1000000 dimensions"),
    "no dimensions": ({"tensors": [tensor("w", [], 0, 0)]}, "0 dimensions"),
    "overflowing dimensions": ({"tensors": [tensor("w", [2**40, 2**40], 0, 0)]}, "'w'"),
    "dimensions that wrap to 0": ({"tensors": [tensor("w", [2**32, 2**32], 0, 0)]}, "'w'"),
    "empty dimension": ({"tensors": [tensor("w", [0], 0, 0)]}, r"shape \(0,\)"),
    "ggml type": ({"tensors": [tensor("w", [32], 9999, 0)]}, "unknown ggml type 9999"),
    "partial block": ({"tensors": [tensor("w", [33], 8, 0)]}, "blocks of 32"),
    "offset": ({"tensors": [tensor("w", [32], 0, HUGE)]}, "truncated"),
    "offset not aligned": ({"tensors": [tensor("w", [32], 0, 4)], "data": bytes(256)}, "alignment 32"),
    "tensor name": ({"tensors": [struct.pack("<Q", HUGE) + bytes(40)]}, "length of tensor name"),
    "tensor twice": ({"tensors": [tensor("w", [8], 0, 0)] * 2, "data": bytes(64)}, "'w' appears twice"),
    "truncated data": ({"tensors": [tensor("w", [32], 0, 0)], "data": bytes(127)}, "truncated"),
    "alignment 0": ({"pairs": [pair("general.alignment", UINT32, 0)]}, "general.alignment"),
    "alignment text": ({"pairs": [pair("general.alignment", STRING, "32")]}, "general.alignment"),
    "split count": ({"pairs": [pair("split.count", STRING, "2")]}, "split.count"),
}  # fmt: skip


@pytest.mark.trap(45)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_one_message_in_little_time_and_memory(tmp_path: Path, case: str) -> None:
    arguments, message = HOSTILE[case]
    path = write(tmp_path / "bad.gguf", **arguments)  # type: ignore[arg-type]
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(QbenchError, match=message) as caught:
        read_gguf(path)
    assert time.monotonic() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert "bad.gguf" in str(caught.value)


@pytest.mark.trap(45)
def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "whole.gguf",
        [pair("a", STRING, "text"), pair("b", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yy"))],
        [tensor("w", [32, 2], 0, 0)],
        bytes(256),
    ).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(QbenchError, match=r"cut\.gguf"):
            read_gguf(path)
    path.write_bytes(whole)
    assert read_gguf(path).tensors["w"].nbytes == 256


@pytest.mark.trap(41)
def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    path = write(
        tmp_path / "a.gguf",
        [pair("general.alignment", UINT32, 64)],
        [tensor("first", [1], 0, 0), tensor("w", [8], 0, 64)],
        bytes(64) + values.tobytes(),
        alignment=64,
    )
    np.testing.assert_array_equal(read_gguf(path).tensors["w"].read().view(np.float32), values)


def test_empty_missing_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name in ("empty.gguf", "missing.gguf"):
        with pytest.raises(QbenchError, match=name):
            read_gguf(tmp_path / name)


def split(folder: Path, *, total: int = 2, second: int = 1) -> Path:
    """Two parts with one tensor each; returns the first."""
    for part, number in enumerate((0, second)):
        pairs = [
            pair("split.no", UINT16, number),
            pair("split.count", UINT16, 2),
            pair("split.tensors.count", INT32, total),
        ]
        data = np.full(8, part, np.float32).tobytes()
        write(folder / f"m-{part + 1:05d}-of-00002.gguf", pairs, [tensor(f"w{part}", [8], 0, 0)], data)
    return folder / "m-00001-of-00002.gguf"


@pytest.mark.trap(42)
def test_split_files_open_from_the_first(tmp_path: Path) -> None:
    file = read_gguf(split(tmp_path))
    assert [path.name for path in file.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for part in (0, 1):
        assert set(file.tensors[f"w{part}"].read().view(np.float32)) == {part}


@pytest.mark.trap(42)
def test_split_files_that_do_not_fit_together(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(QbenchError, match="open the first part"):
        read_gguf(second)
    with pytest.raises(QbenchError, match=r"split\.tensors\.count is 3"):
        read_gguf(split(tmp_path, total=3))
    with pytest.raises(QbenchError, match=r"split\.no is 5"):
        read_gguf(split(tmp_path, second=5))
    split(tmp_path)
    second.unlink()
    with pytest.raises(QbenchError, match=r"m-00002-of-00002\.gguf of 2 is missing"):
        read_gguf(first)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(QbenchError, match="name must end in"):
        read_gguf(renamed)


@pytest.mark.trap(45)
def test_text_array_as_long_as_the_file_stays_small(tmp_path: Path) -> None:
    count = 200_000
    path = write(tmp_path / "a.gguf", [pair("a", ARRAY, struct.pack("<IQ", STRING, count) + bytes(8 * count))])
    assert len(read_gguf(path).metadata["a"]) == count
    numbers = write(tmp_path / "b.gguf", [pair("a", ARRAY, struct.pack("<IQ", UINT64, count) + bytes(8 * count))])
    tracemalloc.start()
    assert len(read_gguf(numbers).metadata["a"]) == count
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
