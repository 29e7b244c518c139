"""Randomized Hadamard rotation (QuaRot, arXiv 2404.00456; QuIP#, arXiv 2402.04396): outliers spread over all channels.

Two kinds of channels may be rotated without a trace, because what reads them can be rotated back: the residual stream
(RMSNorm commutes with a rotation once its weights are in the linears after it) and the value channels of each
key-value head. Everything is folded into weights; nothing is left to do when the model runs.

Where a branch's output passes a norm of its own before it is added to the residual stream (Gemma 2 and 3), that norm's
weights stand between the last linear and the stream: they cannot be folded, ``(g * x) Q`` is no norm of ``x Q'``, and
the residual stream stays as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.models.source import ModelSource, TensorInfo

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BLOCK_TENSOR = re.compile(r"model\.layers\.(\d+)\.(?:\w+\.)*?(\w+)\.(weight|bias)")
ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
READS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), ATTENTION_NORM) | dict.fromkeys(
    ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "gate", "shared_expert_gate"), MLP_NORM
)  # by the last part of the name; `gate` is a router
WRITES = ("o_proj", "down_proj", "w2")
STAYS = ("q_norm", "k_norm")
SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """What the rotation must know of an architecture."""

    norm_offset: float = 0.0  # norms multiply by their weight plus this
    norms_branches: bool = False  # a branch's output is normed before it is added


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"), Family()),
    "gemma": Family(norm_offset=1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(norm_offset=1.0, norms_branches=True)),
}


class Rotated(ModelSource):
    """`source` with residual stream and value heads rotated at random, by `seed`; tensors change as they are loaded.

    The norms on the residual stream become 1, their weights go into the linears they feed; a tied head gets weights of
    its own. Logits stay those of `source` up to rounding. `kept` says what cannot be rotated, in sentences.
    """

    def __init__(self, source: ModelSource, seed: int) -> None:
        """Raises `QbenchError` when the architecture or a tensor is not known to allow the rotation."""
        name = source.config.get("model_type")
        if name not in FAMILIES:
            raise QbenchError(f"rotate: {source.location} is a {name!r} model; known: {', '.join(FAMILIES)}.")
        self.source = source
        self.seed = seed
        self.location = source.location
        self.family = FAMILIES[name]
        self.config = source.config
        self._tensors = dict(source.tensors)
        self.kept: list[str] = []
        if self.family.norms_branches:
            self.kept.append(
                "rotate: only value heads are rotated; the residual stream is not, because each branch's output is "
                "normed before it is added, and no linear can take that norm's weights."
            )
        else:
            self.config = {**source.config, "tie_word_embeddings": False}
            self._tensors = {HEAD: source.tensors[EMBEDDING], **self._tensors}
        for tensor in self._tensors:
            self._module(tensor)

    @property
    def revision(self) -> str:
        return f"{self.source.revision}-rotated{self.seed}"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def load(self, name: str) -> torch.Tensor:
        """The rotated tensor, in its dtype in `source`."""
        stored = self._float(name if name in self.source.tensors else EMBEDDING)
        layer, module = self._module(name)
        tensor = stored.double()
        if not self.family.norms_branches:
            tensor = self._residual(name, tensor, layer, module)
        width = self._head_width
        if module in ("v_proj", "qkv_proj"):
            values = self._value_rows(name, module)
            turned = rotated(tensor[-values:], 0, width, f"{self.seed} value")
            tensor = torch.cat([tensor[:-values], turned])
        elif module == "o_proj" and tensor.ndim == 2:
            tensor = rotated(tensor, 1, width, f"{self.seed} value")
        return tensor.to(stored.dtype)

    def write_side_files(self, folder: Path) -> list[str]:
        return self.source.write_side_files(folder)

    def _residual(self, name: str, tensor: torch.Tensor, layer: str, module: str) -> torch.Tensor:
        """A float64 tensor with its dimension over the residual stream rotated, the norm before it folded in."""
        key, width = f"{self.seed} residual", self._tensors[EMBEDDING].shape[1]
        if module in (ATTENTION_NORM, MLP_NORM) or name == LAST_NORM:
            return torch.ones_like(tensor) - self.family.norm_offset
        if name == EMBEDDING:
            return rotated(tensor, 1, width, key)
        if module in WRITES:
            return rotated(tensor, 0, width, key)
        if tensor.ndim == 2 and (module in READS or name == HEAD):
            norm = LAST_NORM if name == HEAD else f"model.layers.{layer}.{READS[module]}.weight"
            return rotated(tensor * (self._float(norm).double() + self.family.norm_offset), 1, width, key)
        return tensor

    @property
    def _head_width(self) -> int:
        """Channels of one value head, from the first output projection's shape."""
        name = next(name for name in self.source.tensors if name.endswith("o_proj.weight"))
        width: int = self.source.tensors[name].shape[1] // self.config["num_attention_heads"]
        return width

    def _value_rows(self, name: str, module: str) -> int:
        """How many of a projection's last rows make values; in a fused one they come after queries and keys."""
        rows = self.source.tensors[name].shape[0]
        return rows if module == "v_proj" else (rows - self._head_width * self.config["num_attention_heads"]) // 2

    def _float(self, name: str) -> torch.Tensor:
        tensor = self.source.load(name)
        if isinstance(tensor, QuantizedTensor):
            raise QbenchError(f"rotate: {name} of {self.location} is quantized; only float weights can be rotated.")
        return tensor

    def _module(self, name: str) -> tuple[str, str]:
        """A tensor's block ("" outside) and the last part of its module's name."""
        if name in (EMBEDDING, HEAD, LAST_NORM):
            return "", ""
        found = BLOCK_TENSOR.fullmatch(name)
        known = [*READS, *WRITES, *STAYS, ATTENTION_NORM, MLP_NORM, *(SANDWICH if self.family.norms_branches else ())]
        if found is None or found[2] not in known:
            raise QbenchError(f"rotate: {self.location} has a tensor that no rotation is known for: {name}.")
        return found[1], found[2]


def rotated(tensor: torch.Tensor, dim: int, width: int, key: str) -> torch.Tensor:
    """Each run of `width` channels along `dim` of a float64 `tensor` times the same orthogonal matrix, drawn by `key`.

    The matrix is ``diag(+-1) (H x O)``: H is the Hadamard matrix of the largest power of two in `width`, O a random
    orthogonal one of the odd rest, x their Kronecker product.
    """
    signs, hadamard, rest = _factors(width, key)
    moved = tensor.movedim(dim, -1)
    runs = moved.reshape(-1, width) * signs
    runs = torch.einsum("apm,pq,mn->aqn", runs.reshape(-1, len(hadamard), len(rest)), hadamard, rest)
    return runs.reshape(moved.shape).movedim(-1, dim).contiguous()


@cache
def _factors(width: int, key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    signs = torch.randint(2, (width,), generator=generator).double() * 2 - 1
    power = width & -width
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    rest = torch.randn(width // power, width // power, dtype=torch.float64, generator=generator)
    return signs, hadamard / power**0.5, torch.linalg.qr(rest).Q
