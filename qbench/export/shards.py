"""Safetensors files of any total size, written whole: one file, or numbered shards with an index.

Names and index as Hugging Face's loaders expect them (``model.safetensors``, or ``model-00001-of-00003.safetensors``
and ``model.safetensors.index.json``). The bytes depend on nothing but the tensors and their order.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qbench.errors import QbenchError
from qbench.models.json_file import read_json
from qbench.models.safetensors_writer import write_safetensors

SHARD_BYTES = 2 * 10**9  # a shard is gathered in memory before it is written


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes `tensors` (name, tensor; taken one by one) into `folder`; returns the files, the index last.

    A view is saved at its own size. A tensor that repeats another one of its shard (same memory, same shape) is saved
    once; the file's metadata maps its name to the kept one, as ``safetensors.torch.save_model`` does.
    """
    parts = [_write_part(folder, n, group) for n, group in enumerate(_groups(tensors, shard_bytes), 1)]
    if len(parts) == 1:
        return [parts[0][0].rename(folder / "model.safetensors")]
    files, weight_map, total = [], {}, 0
    for n, (part, sizes) in enumerate(parts, 1):
        files.append(part.rename(folder / f"model-{n:05d}-of-{len(parts):05d}.safetensors"))
        weight_map.update(dict.fromkeys(sizes, files[-1].name))
        total += sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, path]


def _groups(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Runs of neighbouring tensors of at most `shard_bytes`, or one tensor that is larger by itself."""
    group: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    size = 0
    for name, tensor in tensors:
        assert name not in seen, f"tensor {name} is written twice"
        seen.add(name)
        if group and size + tensor.nbytes > shard_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


def _write_part(folder: Path, number: int, group: dict[str, torch.Tensor]) -> tuple[Path, dict[str, int]]:
    """One shard under a temporary name, and the bytes of each tensor in it."""
    kept: dict[tuple[object, ...], str] = {}
    own: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}
    for name, tensor in group.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        first = kept.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            own[name] = (tensor if whole else tensor.contiguous().clone()).cpu()
        else:
            metadata[name] = first
    path = folder / f".part-{number:05d}.safetensors"
    write_safetensors(path, own, metadata)
    return path, {name: tensor.nbytes for name, tensor in own.items()}


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `folder` that takes its place when the block succeeds, and is removed if not.

    Raises `QbenchError` before anything is written when `folder` holds something else than an earlier export.
    """
    _refuse_foreign(folder)
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QbenchError(f"{folder}: the disk is full; nothing was kept.") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise QbenchError(f"{folder}: is a file; an export needs a folder.")
    config = folder / "config.json"
    if any(folder.iterdir()) and not (config.is_file() and "quantization_config" in read_json(config)):
        raise QbenchError(f"{folder}: holds files that are no earlier export; name a new or an empty folder.")
