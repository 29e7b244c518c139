"""Randomized Hadamard rotation (QuaRot, arXiv 2404.00456; QuIP#, arXiv 2402.04396): outliers spread over all channels.

Two kinds of channels may be rotated without a trace, because what reads them can be rotated back: the residual stream
(RMSNorm commutes with a rotation once its weights are in the linears after it) and the value channels of each
key-value head. Everything is folded into weights; nothing is left to do when the model runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.models.offgrid import AXES, BLOCK_TENSOR, FAMILIES, OUTSIDE
from qbench.models.source import ModelSource, TensorInfo

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
NORM_BEFORE = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm") | dict.fromkeys(
    ("gate_proj", "up_proj"), "post_attention_layernorm"
)


class Rotated(ModelSource):
    """`source` with residual stream and value heads rotated at random, by `seed`; tensors change as they are loaded.

    The norms on the residual stream become 1, their weights go into the linears they feed; a tied head gets weights of
    its own. Logits stay those of `source` up to rounding.
    """

    def __init__(self, source: ModelSource, seed: int) -> None:
        """Raises `QbenchError` when the architecture or a tensor is not known to allow the rotation."""
        family = source.config.get("model_type")
        if family not in FAMILIES:
            raise QbenchError(f"rotate: {source.location} is a {family!r} model; known: {', '.join(FAMILIES)}.")
        self.source = source
        self.seed = seed
        self.location = source.location
        self.config = {**source.config, "tie_word_embeddings": False}
        self._tensors = {HEAD: source.tensors[EMBEDDING], **source.tensors}
        for name in self._tensors:
            self._place(name)

    @property
    def revision(self) -> str:
        return f"{self.source.revision}-rotated{self.seed}"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def load(self, name: str) -> torch.Tensor:
        """The rotated tensor, in its dtype in `source`."""
        stored = self._float(name if name in self.source.tensors else EMBEDDING)
        kind, axes = self._place(name)
        if kind.endswith("layernorm") or name == LAST_NORM:
            return torch.ones_like(stored)
        tensor = stored.double()
        norm = self._norm_before(name, kind)
        if norm is not None and tensor.ndim == 2:
            tensor = tensor * self._float(norm).double()
        for dim, axis in enumerate(axes[: tensor.ndim]):
            if axis == "residual":
                tensor = rotated(tensor, dim, self.config["hidden_size"], f"{self.seed} residual")
            elif axis in ("value", "value_of_query_heads"):
                tensor = rotated(tensor, dim, self._head_width, f"{self.seed} value")
        return tensor.to(stored.dtype)

    def write_side_files(self, folder: Path) -> list[str]:
        return self.source.write_side_files(folder)

    @property
    def _head_width(self) -> int:
        width: int = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        return width

    def _float(self, name: str) -> torch.Tensor:
        tensor = self.source.load(name)
        if isinstance(tensor, QuantizedTensor):
            raise QbenchError(f"rotate: {name} of {self.location} is quantized; only float weights can be rotated.")
        return tensor

    def _norm_before(self, name: str, kind: str) -> str | None:
        """The norm whose output a linear reads."""
        if name == HEAD:
            return LAST_NORM
        norm = NORM_BEFORE.get(kind)
        found = BLOCK_TENSOR.fullmatch(name)
        return f"model.layers.{found[1]}.{norm}.weight" if norm and found else None

    def _place(self, name: str) -> tuple[str, tuple[str | None, str | None]]:
        """A tensor's module within its block ("" outside) and what its dimensions run over."""
        if name in OUTSIDE:
            return "", OUTSIDE[name]
        found = BLOCK_TENSOR.fullmatch(name)
        if found is None or found[2] not in AXES:
            raise QbenchError(f"rotate: {self.location} has a tensor that no rotation is known for: {name}.")
        return found[2], AXES[found[2]]


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
