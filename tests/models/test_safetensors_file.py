"""The header check against hostile files, and values against the safetensors library."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qbench.errors import QbenchError
from qbench.models.safetensors_file import SafetensorsFile


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path: Path, header: dict[str, Any] | str | bytes, data: bytes = bytes(8), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_values_and_dtypes_equal_what_the_library_wrote(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(4, 2).bfloat16(),
        "f8": torch.randn(7).to(torch.float8_e4m3fn),
        "i32": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
    }
    save_file(values, tmp_path / "a.safetensors", metadata={"format": "pt", "note": 'a "}" inside'})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert set(file.tensors) == set(values)
    for name, value in values.items():
        found = file.load(name)
        assert found.dtype == value.dtype and found.shape == value.shape == file.tensors[name].shape
        assert torch.equal(
            found.view(torch.uint8) if name == "f8" else found, value.view(torch.uint8) if name == "f8" else value
        )
        assert file.tensors[name].nbytes == value.numel() * value.element_size()


def test_changing_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    file.load("w").zero_()
    assert torch.equal(file.load("w"), torch.ones(4))


HOSTILE: dict[str, tuple[dict[str, Any] | str | bytes, bytes, str]] = {
    "no JSON": ("{not json", b"", "bad safetensors header"),
    "an array": ("[]", b"", "expected '{'"),
    "not UTF-8": (b'{"\xff": {}}', b"", "bad safetensors header"),
    "entry is a list": ('{"w": [1, 2, {}]}', b"", "'w'"),
    "missing key": ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "'w'.*exactly"),
    "unknown dtype": ({"w": entry("Q9")}, bytes(8), "'w'.*'Q9'"),
    "negative dimension": ({"w": entry(shape=[-2])}, bytes(8), "'w'.*shape"),
    "fractional dimension": ({"w": entry(shape=[2.0])}, bytes(8), "'w'.*shape"),
    "true as a dimension": ({"w": entry(shape=[True, 2])}, bytes(8), "'w'.*shape"),
    "dimension of 2^63": ({"w": entry(shape=[2**63])}, bytes(8), "'w'.*shape"),
    "product overflows": ({"w": entry(shape=[2**62, 2**62])}, bytes(8), "'w'.*needs"),
    "a million dimensions": ({"w": entry(shape=[1] * 10**6)}, bytes(8), "'w'"),
    "20 dimensions": ({"w": entry(shape=[1] * 20)}, bytes(8), "'w'.*at most 16"),
    "one offset": ({"w": entry(offsets=[0])}, bytes(8), "'w'.*data_offsets"),
    "offsets reversed": ({"w": entry(offsets=[8, 0])}, bytes(8), "'w'.*hold -8"),
    "too few bytes": ({"w": entry(offsets=[0, 4])}, bytes(4), "'w'.*needs 8 bytes"),
    "beyond the file": ({"w": entry(offsets=[2**40, 2**40 + 8])}, bytes(8), "'w'.*truncated"),
    "truncated": ({"w": entry()}, bytes(5), "'w'.*truncated"),
    "left over": ({"w": entry()}, bytes(9), "1 unclaimed bytes after.*'w'"),
    "gap": ({"v": entry(), "w": entry(offsets=[12, 20])}, bytes(20), "4 unclaimed bytes between 'v' and 'w'"),
    "overlap": ({"v": entry(), "w": entry(offsets=[4, 12])}, bytes(12), "'w' overlaps 'v'"),
    "same name twice": (f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry())}}}', bytes(8), "'w'.*twice"),
    "same key twice": (
        '{"w": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}',
        bytes(8),
        "'shape'",
    ),
    "deep nesting": ("[" * 10**6, b"", "bad safetensors header"),
    "deep nesting in an entry": ('{"w": ' + "[" * 10**6 + "}", b"", "'w'|nested|recursion"),
    "endless metadata": ('{"__metadata__": ' + "[[]," * 10**6, b"", "bad safetensors header"),
    "text after the end": (json.dumps({"w": entry()}) + "x", bytes(8), "after the closing brace"),
}


@pytest.mark.trap(45)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_quickly_and_by_name(tmp_path: Path, case: str) -> None:
    header, data, message = HOSTILE[case]
    refused_quickly(write(tmp_path / "evil.safetensors", header, data), message)


@pytest.mark.trap(45)
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 1000])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    refused_quickly(write(tmp_path / "evil.safetensors", {"w": entry()}, length=length), f"claims {length} bytes")


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_file_without_a_header_length_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "evil.safetensors").write_bytes(bytes(size))
    refused_quickly(tmp_path / "evil.safetensors", "too short")


def test_a_sparse_file_with_a_huge_header_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "evil.safetensors", "{", length=2**32)
    with path.open("r+b") as file:
        file.truncate(2**33)
    refused_quickly(path, "allowed")


def refused_quickly(path: Path, message: str) -> None:
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(QbenchError, match=message) as caught:
            SafetensorsFile(path)
        assert time.perf_counter() - started < 1
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1000
