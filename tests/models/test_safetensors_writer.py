"""Safetensors files written here: judged by the safetensors library, whole or absent, the file named on a refusal."""

import errno
import hashlib
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from qbench.models.safetensors_file import DTYPES, SafetensorsFile
from qbench.models.safetensors_writer import write_safetensors

SHAPES = ((), (0, 3), (5,), (3, 7), (2, 3, 5))


def made(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"{dtype} “{shape}”": torch.full(shape, 1).to(dtype) for shape in SHAPES}


def test_the_library_reads_every_dtype_and_shape_back(tmp_path: Path) -> None:
    tensors = {
        name: tensor for _, torch_name in DTYPES.values() for name, tensor in made(getattr(torch, torch_name)).items()
    }
    tensors["a view"] = torch.arange(12).reshape(3, 4).T
    path = tmp_path / "new folder" / "a.safetensors"
    write_safetensors(path, tensors, {"z": "“1”", "a": "2"})
    read = load_file(path)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert SafetensorsFile(path).tensors[name].shape == tuple(tensor.shape)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"z": "“1”", "a": "2"}
    assert list(path.parent.iterdir()) == [path]


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(3), "c": torch.ones(2, 2, dtype=torch.float16)}
    write_safetensors(tmp_path / "a", tensors, {"format": "pt"})
    assert (
        hashlib.sha256((tmp_path / "a").read_bytes()).digest()
        == hashlib.sha256(save(tensors, {"format": "pt"})).digest()
    )


@contextmanager
def small_files() -> Iterator[None]:
    """The system refuses to let a file grow beyond 10000 bytes: any file of this process, the test log included."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_the_system_refuses_to_write_is_named_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(10)})
    with pytest.raises(OSError) as caught, small_files():
        write_safetensors(path, {"a": torch.ones(10_000)})
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert torch.equal(load_file(path)["a"], torch.ones(10))
    assert list(tmp_path.iterdir()) == [path]
