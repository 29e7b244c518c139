"""Hugging Face folders and hub ids: config.json, safetensors (one file or shards with an index), tokenizer files.

Only data is read. Pickled weights are refused where the location is examined; Python files are neither downloaded,
copied nor run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError
from qbench.models.content_hash import content_hash
from qbench.models.detect import kind_of
from qbench.models.json_file import read_json
from qbench.models.safetensors_file import SafetensorsFile
from qbench.models.source import OPENERS, ModelSource, TensorInfo
from qbench.progress import console

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SIDE_FILES = (  # tokenizer, special tokens, chat templates and generation settings; never code
    "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken", "tekken.json", "generation_config.json", "chat_template*.json",
    "chat_template*.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip


class HuggingFaceSource(ModelSource):
    """A folder in Hugging Face's layout; headers are read and checked when it is opened."""

    def __init__(self, folder: Path, location: str, commit: str | None = None) -> None:
        self.folder = folder
        self.location = location
        self.config = read_json(folder / "config.json")
        self._commit = commit
        self._files = _open_weights(folder)
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self._tensors = {name: info for file in self._files for name, info in file.tensors.items()}
        self._settle_tied_head()

    @cached_property
    def revision(self) -> str:
        if self._commit is not None:
            return self._commit
        names = ["config.json", *side_files(self.folder), *(file.path.name for file in self._files)]
        return content_hash({name: self.folder / name for name in names})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def load(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise KeyError(name)
        return self._file_of[name].load(name)

    def write_side_files(self, folder: Path) -> list[str]:
        names = side_files(self.folder)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)
        return names

    def _settle_tied_head(self) -> None:
        """Makes config and tensors agree: a stored head that repeats the tied embedding is dropped; one that differs
        from it is kept and the tie undone, as transformers does."""
        tied = self.config.setdefault("tie_word_embeddings", HEAD not in self._tensors)
        if not isinstance(tied, bool):
            raise QbenchError(f"{self.location}: config.json: tie_word_embeddings is {tied!r}, allowed: true or false.")
        if not tied or HEAD not in self._tensors or EMBEDDING not in self._tensors:
            return
        head, embedding = self._file_of[HEAD], self._file_of[EMBEDDING]
        if self._tensors[HEAD] == self._tensors[EMBEDDING] and head.read_bytes(HEAD) == embedding.read_bytes(EMBEDDING):
            del self._tensors[HEAD]
        else:
            self.config["tie_word_embeddings"] = False
            console.print(f"{self.location}: config.json ties the head, the stored head differs: both are kept.")


def open_huggingface(location: str) -> HuggingFaceSource:
    """Opens a local folder. Raises `QbenchError` naming the file (and tensor) that is missing or wrong."""
    return HuggingFaceSource(Path(location), location)


def open_hub(location: str) -> ModelSource:
    """Opens ``org/name[@revision]``: downloads config, safetensors and tokenizer files into the hub's cache.

    Raises `QbenchError` when the model cannot be reached or found and is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    name, _, revision = location.partition("@")
    try:
        snapshot = snapshot_download(
            name, revision=revision or None, allow_patterns=["*.safetensors", "*.json", *SIDE_FILES]
        )
    except GatedRepoError as error:
        raise QbenchError(
            f"{location}: access has to be granted; ask for it on the model's page, then log in."
        ) from error
    except RepositoryNotFoundError as error:
        raise QbenchError(f"{location} is neither a local folder nor a model you can see on the hub.") from error
    except LocalEntryNotFoundError as error:
        raise QbenchError(
            f"{location} is no local folder, the hub cannot be reached, and the model is not in its cache."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise QbenchError(f"{location} could not be downloaded from the hub: {error}") from error
    folder = Path(snapshot)
    kind = kind_of(str(folder))
    if kind == "huggingface":
        return HuggingFaceSource(folder, location, commit=folder.name)
    source: ModelSource = OPENERS.get(kind)(str(folder))
    source.location = location
    return source


def side_files(folder: Path) -> list[str]:
    """Names, relative to `folder`, of the files that travel with a model unchanged."""
    found = {path for pattern in SIDE_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found if path.name != INDEX)


def _open_weights(folder: Path) -> list[SafetensorsFile]:
    """The single file when there is one, else every shard of the index, each checked against the index."""
    if (folder / SINGLE).is_file():
        return [SafetensorsFile(folder / SINGLE)]
    older = sorted(folder.glob("gptq_model-*.safetensors"))  # AutoGPTQ's name for a single file
    if len(older) == 1:
        return [SafetensorsFile(older[0])]
    index = folder / INDEX
    if not index.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))) or "none"
        raise QbenchError(f"{folder}: neither {SINGLE} nor {INDEX} is there. Safetensors found: {found}.")
    shard_of = _read_index(index)
    files = []
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).is_file():
            missing = sorted(name for name, held in shard_of.items() if held == shard)
            raise QbenchError(
                f"{folder}: shard {shard} is missing; it holds {len(missing)} tensors ({missing[0]}, ...)."
            )
        file = SafetensorsFile(folder / shard)
        _check_shard(file, shard, shard_of)
        files.append(file)
    return files


def _read_index(index: Path) -> dict[str, str]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QbenchError(f"{index}: weight_map is missing or empty.")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
        if not plain:
            raise QbenchError(f"{index}: tensor {name!r} is said to be in {shard!r}; allowed: a file of this folder.")
    return weight_map


def _check_shard(file: SafetensorsFile, shard: str, shard_of: dict[str, str]) -> None:
    for name in file.tensors:
        if name not in shard_of:
            raise QbenchError(f"{file.path}: tensor {name!r} is in this shard but not in {INDEX}.")
        if shard_of[name] != shard:
            raise QbenchError(f"{file.path}: tensor {name!r} is in this shard and, by {INDEX}, in {shard_of[name]}.")
    for name, held in shard_of.items():
        if held == shard and name not in file.tensors:
            raise QbenchError(f"{file.path}: tensor {name!r} is missing; {INDEX} says it is in this shard.")
