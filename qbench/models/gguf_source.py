"""A GGUF file as a model source: Hugging Face's names, shapes, row order and side files."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property
from pathlib import Path

import gguf
import torch

from qbench.errors import QbenchError
from qbench.formats.gguf_blocks import DECODERS
from qbench.models.gguf_config import config_from_gguf
from qbench.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from qbench.models.gguf_names import ARCHITECTURES, rotary_heads, rows_to_huggingface, to_huggingface
from qbench.models.gguf_rope import FACTORS_TENSOR
from qbench.models.gguf_tokenizer import GGUFTokenizer
from qbench.models.source import ModelSource, TensorInfo
from qbench.resources import sha256_file

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
    if tensor.type in DECODERS:
        return DECODERS[tensor.type](rows.flatten(0, -2)).reshape(tensor.shape)
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[tensor.type]))


class GGUFSource(ModelSource):
    """See `open_gguf`. `load` gives F32, F16 and BF16 as stored and every block type as float32."""

    def __init__(self, location: str, file: GGUFFile) -> None:
        self.location = location
        self.file = file
        self.config = config_from_gguf(file)
        self.tokenizer = GGUFTokenizer(file)
        self._places: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            name = to_huggingface(tensor.name)
            if name is None and tensor.name != FACTORS_TENSOR:
                raise QbenchError(f"{location}: tensor {tensor.name!r} has no place in this architecture")
            if name is not None:
                self._check(tensor)
                self._places[name] = tensor
        linears = Counter(t.type for n, t in self._places.items() if ".layers." in n and len(t.shape) == 2)
        if not linears:
            raise QbenchError(f"{location}: has no decoder blocks")
        most = linears.most_common(1)[0][0]
        self.grid = None if most in PLAIN else most

    def _check(self, tensor: GGUFTensor) -> None:
        """Refuses a block type that nothing here can decode and rows that do not divide into heads."""
        known = {*PLAIN, *DECODERS, *(kind.name for kind in gguf.quants._type_traits)}
        if tensor.type not in known:
            raise QbenchError(f"{self.location}: tensor {tensor.name!r} is of type {tensor.type}, which cannot be read")
        heads = self._heads(tensor)
        if heads and tensor.shape[0] != heads * self.config["head_dim"]:
            raise QbenchError(
                f"{self.location}: tensor {tensor.name!r} has {tensor.shape[0]} rows, not {heads} heads of "
                f"{self.config['head_dim']}"
            )

    def _heads(self, tensor: GGUFTensor) -> int | None:
        if not ARCHITECTURES[self.file.metadata["general.architecture"]].interleaved_rows:
            return None
        return rotary_heads(tensor.name, self.config["num_attention_heads"], self.config["num_key_value_heads"])

    @cached_property
    def revision(self) -> str:
        """SHA-256 of the file; of the parts' hashes when it is split."""
        hashes = [sha256_file(path) for path in self.file.paths]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

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
