"""qbench's own on-disk form of a compressed model: what exports, runtime and evaluation start from.

A folder with the source's ``config.json`` and side files, safetensors shards with their index, and ``qbench.json``:

    {"version": 1, "source": {...}, "quantized": {"model.layers.0.mlp.up_proj.weight":
        {"format": {"name": "int", ...}, "shape": [1536, 576], "parts": ["codes", "scale"]}}}

An entry whose linear's input is rounded as well has an ``"activation": {"name": "int8", ...}``.
A model whose keys and values are kept in a format of their own has a ``"kv_cache": {"format": {"name": "fp8"},
"scales": {"0": [keys, values], ...}}``; formats that need no calibration have no scales.

A part of a quantized tensor is stored under the tensor's name, a dot, and the part's name. ``qbench.json`` is written
last: a folder without it is not a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qbench.errors import QbenchError
from qbench.formats.activation import activation_from_dict
from qbench.formats.base import QuantizedTensor, format_from_dict
from qbench.formats.kv_cache import KVCache
from qbench.models.huggingface import open_huggingface
from qbench.models.safetensors_writer import write_safetensors
from qbench.models.source import ModelSource, TensorInfo
from qbench.resources import written_whole

MANIFEST = "qbench.json"
VERSION = 1


class CompressedModel(ModelSource):
    """A folder written by the compression engine, read lazily."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self.folder = folder
        self._stored = open_huggingface(str(folder))
        self.config = self._stored.config
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise QbenchError(f"{folder / MANIFEST}: not JSON ({error}).") from None
        if manifest.get("version") != VERSION:
            found = manifest.get("version")
            raise QbenchError(f"{folder / MANIFEST}: version is {found!r}; this qbench reads version {VERSION}.")
        self.origin: dict[str, Any] = manifest["source"]
        if "kv_cache" in manifest:
            self.kv_cache = KVCache.from_dict(manifest["kv_cache"])
        self._quantized: dict[str, dict[str, Any]] = manifest["quantized"]
        for name, entry in self._quantized.items():
            for part in entry["parts"]:
                if f"{name}.{part}" not in self._stored.tensors:
                    raise QbenchError(f"{folder}: {name} lacks its part {part!r} ({name}.{part} is in no shard).")

    @cached_property
    def revision(self) -> str:
        digest = hashlib.sha256((self.folder / MANIFEST).read_bytes())
        digest.update(self._stored.revision.encode())
        return digest.hexdigest()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = dict(self._stored.tensors)
        for name, entry in self._quantized.items():
            parts = [infos.pop(f"{name}.{part}") for part in entry["parts"]]
            nbytes = sum(part.nbytes for part in parts)
            infos[name] = TensorInfo(tuple(entry["shape"]), entry["format"]["name"], nbytes)
        return infos

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        entry = self._quantized.get(name)
        if entry is None:
            return self._stored.load(name)
        parts: dict[str, torch.Tensor] = {}
        for part in entry["parts"]:
            loaded = self._stored.load(f"{name}.{part}")
            assert isinstance(loaded, torch.Tensor)
            parts[part] = loaded
        rows, columns = entry["shape"]
        activation = activation_from_dict(entry["activation"]) if "activation" in entry else None
        return QuantizedTensor(format_from_dict(entry["format"]), (rows, columns), parts, activation)

    def write_side_files(self, folder: Path) -> list[str]:
        return self._stored.write_side_files(folder)


def open_compressed(location: str) -> CompressedModel:
    """Opens a folder that holds ``qbench.json``."""
    return CompressedModel(Path(location))


class CompressedWriter:
    """Writes a compressed model shard by shard into `folder`; `finish` makes it whole."""

    def __init__(self, folder: Path, num_shards: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.num_shards = num_shards

    def shard_path(self, index: int) -> Path:
        """File of shard `index` (from 0)."""
        return self.folder / f"model-{index + 1:05d}-of-{self.num_shards:05d}.safetensors"

    def write_shard(self, index: int, tensors: Mapping[str, torch.Tensor | QuantizedTensor]) -> None:
        """Writes one shard, whole or not at all. Its header records how its quantized tensors are made up."""
        plain: dict[str, torch.Tensor] = {}
        quantized: dict[str, Any] = {}
        for name in sorted(tensors):
            tensor = tensors[name]
            if isinstance(tensor, QuantizedTensor):
                plain |= {f"{name}.{part}": value for part, value in tensor.parts.items()}
                entry = {"format": tensor.format.to_dict(), "shape": list(tensor.shape), "parts": sorted(tensor.parts)}
                if tensor.activation is not None:
                    entry["activation"] = tensor.activation.to_dict()
                quantized[name] = entry
            else:
                plain[name] = tensor
        write_safetensors(self.shard_path(index), plain, {"qbench": json.dumps(quantized, sort_keys=True)})

    def finish(self, source: ModelSource, config: dict[str, Any], kv_cache: KVCache | None = None) -> CompressedModel:
        """Writes index, config, side files and, last, ``qbench.json``; opens the result."""
        from safetensors import safe_open

        weight_map: dict[str, str] = {}
        quantized: dict[str, Any] = {}
        total = 0
        for index in range(self.num_shards):
            path = self.shard_path(index)
            with safe_open(path, framework="pt") as shard:
                weight_map |= dict.fromkeys(shard.keys(), path.name)
                quantized |= json.loads(shard.metadata()["qbench"])
                for key in shard.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                    piece = shard.get_tensor(key)
                    total += piece.numel() * piece.element_size()
        index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        source.write_side_files(self.folder)
        self._write_json("model.safetensors.index.json", index_json)
        self._write_json("config.json", config)
        origin = {"location": source.location, "revision": source.revision}
        manifest = {"version": VERSION, "source": origin, "quantized": dict(sorted(quantized.items()))}
        if kv_cache is not None:
            manifest["kv_cache"] = kv_cache.to_dict()
        self._write_json(MANIFEST, manifest)
        return CompressedModel(self.folder)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with written_whole(self.folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
