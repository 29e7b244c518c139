"""A GGUF file as a model source: Hugging Face's names, shapes, row order and side files."""

from __future__ import annotations

from collections import Counter
from functools import cache, cached_property
from pathlib import Path

import gguf
import numpy as np
import torch

from qbench.errors import QbenchError
from qbench.formats import gguf_blocks
from qbench.models.content_hash import content_hash
from qbench.models.gguf_config import config_from_gguf
from qbench.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from qbench.models.gguf_names import ARCHITECTURES, rotary_heads, rows_to_huggingface, to_huggingface
from qbench.models.gguf_rope import FACTORS_TENSOR
from qbench.models.gguf_shapes import check_tensors
from qbench.models.gguf_tokenizer import GGUFTokenizer
from qbench.models.source import ModelSource, TensorInfo

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def open_gguf(location: str | Path) -> GGUFSource:
    """Opens a GGUF file (of a split model: its first part). Reads the header only.

    Raises `QbenchError` naming the file and what is wrong with it or not supported.
    """
    path = Path(location)
    if not path.is_file():
        raise QbenchError(f"{location}: there is no such file")
    return GGUFSource(str(location), read_gguf(path))


def decode(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor's values in the file's row order: the stored dtype, or float32 from a block type."""
    data = torch.frombuffer(bytearray(tensor.read()), dtype=torch.uint8)
    if tensor.type in PLAIN:
        return data.view(PLAIN[tensor.type]).reshape(tensor.shape)
    rows = data.reshape(*tensor.shape[:-1], -1)
    if tensor.type in gguf_blocks.KINDS:
        return gguf_blocks.decode(tensor.type, rows.flatten(0, -2)).reshape(tensor.shape)
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[tensor.type]))


@cache
def can_decode(kind: str) -> bool:
    """Whether `decode` knows a ggml type."""
    if kind in PLAIN or kind in gguf_blocks.KINDS:
        return True
    ggml_type = gguf.GGMLQuantizationType[kind]
    try:
        gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[ggml_type][1], np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


class GGUFSource(ModelSource):
    """See `open_gguf`. `load` gives F32, F16 and BF16 as stored and every block type as float32."""

    def __init__(self, location: str, file: GGUFFile) -> None:
        self.location = location
        self.file = file
        self.config = config_from_gguf(file)
        self.tokenizer = GGUFTokenizer(file)
        if len(self.tokenizer.tokens) > self.config["vocab_size"]:
            found = f"{len(self.tokenizer.tokens)} tokens for {self.config['vocab_size']} embedding rows"
            raise QbenchError(f"{location}: {found}")
        places = check_tensors(file, self.config)
        for name in sorted(file.tensors.keys() - places.keys() - {FACTORS_TENSOR}):
            raise QbenchError(f"{location}: tensor {name!r} has no place in this architecture")
        for name, tensor in places.items():
            if not can_decode(tensor.type):
                raise QbenchError(f"{location}: tensor {name!r} is of type {tensor.type}, which cannot be read")
        self._places = {to_huggingface(name): tensor for name, tensor in places.items()}
        linears = Counter(t.type for t in places.values() if t.name.startswith("blk.") and len(t.shape) == 2)
        most = linears.most_common(1)[0][0]
        self.grid = None if most in PLAIN else most

    def _heads(self, tensor: GGUFTensor) -> int | None:
        if not ARCHITECTURES[self.file.metadata["general.architecture"]].interleaved_rows:
            return None
        return rotary_heads(tensor.name, self.config["num_attention_heads"], self.config["num_key_value_heads"])

    @cached_property
    def revision(self) -> str:
        """A hash of the content of every part."""
        return content_hash({f"{number:05d}": path for number, path in enumerate(self.file.paths)})

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(t.shape, t.type, t.nbytes) for name, t in self._places.items()}

    def load(self, name: str) -> torch.Tensor:
        tensor = self._places[name]
        heads = self._heads(tensor)
        values = decode(tensor)
        return values if heads is None else rows_to_huggingface(values, heads)

    def write_side_files(self, folder: Path) -> list[str]:
        return self.tokenizer.write(folder)
