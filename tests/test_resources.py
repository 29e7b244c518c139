"""A folder has one writer at a time, and what a killed one left half written does not stay."""

import errno
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.resources import LOCK, sole_user, written_whole


def test_a_second_writer_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "a"
    with sole_user(out):
        with pytest.raises(QbenchError, match="another run is writing here"), sole_user(out):
            pass
    with sole_user(out):
        pass


def test_leftovers_of_a_killed_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = [tmp_path / "variants/a/model.part/model-1.safetensors", tmp_path / "variants/a/.hidden"]
    left = [
        tmp_path / "variants/a/.gptq.part/.b.7.part",
        tmp_path / "variants/a/.gptq.part/c",
        tmp_path / ".run.json.1.part",
    ]
    for path in kept + left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with sole_user(tmp_path):
        found = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert found - {tmp_path / LOCK} == set(kept)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError) as caught, written_whole(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise OSError(number, "full")
    assert caught.value.filename == str(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())
