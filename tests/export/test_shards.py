"""Sharded safetensors: every tensor once, sizes right, views at their own size, folders whole or absent."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qbench.errors import QbenchError
from qbench.export.shards import folder_written_whole, write_shards
from qbench.models.safetensors_file import SafetensorsFile

TENSORS = {f"t{i}": torch.arange(100, dtype=torch.float32) + i for i in range(7)}  # 400 bytes each


def test_one_file_when_it_fits(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, TENSORS.items())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }


@pytest.mark.trap(31)
def test_every_tensor_is_in_the_shard_the_index_says(tmp_path: Path) -> None:
    *shards, index_path = write_shards(tmp_path, TENSORS.items(), shard_bytes=1000)
    assert [path.name for path in shards] == [f"model-{i:05d}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    index = json.loads(index_path.read_text())
    held = {name: path.name for path in shards for name in SafetensorsFile(path).tensors}
    assert index["weight_map"] == held
    assert len(held) == sum(len(SafetensorsFile(path).tensors) for path in shards) == 7
    assert index["metadata"]["total_size"] == 7 * 400
    assert {path.name for path in tmp_path.iterdir()} == {*held.values(), "model.safetensors.index.json"}


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [("a", torch.zeros(4)), ("b", torch.zeros(999)), ("c", torch.zeros(4))], 100)
    assert [list(SafetensorsFile(path).tensors) for path in shards[:-1]] == [["a"], ["b"], ["c"]]


@pytest.mark.trap(32)
def test_views_are_saved_at_their_own_size_and_shared_memory_once(tmp_path: Path) -> None:
    big = torch.arange(10000.0).reshape(100, 100)
    tensors = {"whole": big, "tied": big, "rows": big[3:5], "turned": big[:2].T, "zero": torch.empty(0)}
    (path,) = write_shards(tmp_path, tensors.items())
    saved = load_file(path)
    assert set(saved) == {"whole", "rows", "turned", "zero"}
    assert torch.equal(saved["rows"], big[3:5]) and torch.equal(saved["turned"], big[:2].T)
    with safe_open(path, "pt") as file:
        assert file.metadata()["tied"] == "whole"
    assert path.stat().st_size < 4 * (10000 + 200 + 200) + 1000


def test_the_bytes_depend_on_the_tensors_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, TENSORS.items(), 1000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folder_written_whole(tmp_path / "out") as part:
        (part / "half").write_text("x")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(ZeroDivisionError), folder_written_whole(tmp_path / "out"):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "config.json").is_file()
    with folder_written_whole(tmp_path / "out") as part:
        (part / "new").write_text("x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(QbenchError, match="is a file"), folder_written_whole(tmp_path / "out"):
        pass


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match="disk is full"), folder_written_whole(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "half").write_text("x")
    with folder_written_whole(tmp_path / "out") as part:
        assert not list(part.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
