"""Taking a dequantized model off the grid its weights sit on, without changing what it computes.

A source that was itself quantized (a Q4_1 GGUF file) flatters every format with a similar grid. Three kinds of
channels can be reordered freely as long as everything that touches them is reordered alike: the residual stream,
each MLP's inner channels, and the value channels inside each key-value head. After a random reordering the values
that shared one scale no longer lie in one block, and the grid is gone. (Query and key channels stay: rotary
embedding gives their position a meaning.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.models.source import ModelSource, TensorInfo

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # RMSNorm, rotary q and k, gated MLP
BLOCK_TENSOR = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)\.(weight|bias)")
# What each dimension of a module's weight runs over: (rows, columns); a bias runs over the rows.
AXES: dict[str, tuple[str | None, str | None]] = {
    "q_proj": (None, "residual"),
    "k_proj": (None, "residual"),
    "v_proj": ("value", "residual"),
    "o_proj": ("residual", "value_of_query_heads"),
    "gate_proj": ("inner", "residual"),
    "up_proj": ("inner", "residual"),
    "down_proj": ("residual", "inner"),
    "input_layernorm": ("residual", None),
    "post_attention_layernorm": ("residual", None),
    "q_norm": (None, None),
    "k_norm": (None, None),
}
OUTSIDE: dict[str, tuple[str | None, str | None]] = {
    "model.embed_tokens.weight": (None, "residual"),
    "model.norm.weight": ("residual", None),
    "lm_head.weight": (None, "residual"),
}


class OffGrid(ModelSource):
    """`source` with its channels in a random order that depends on `seed`; tensors are reordered as they are loaded.

    Logits stay those of `source` up to the order of float sums. `off_grid_of` names the grid that was left.
    """

    def __init__(self, source: ModelSource, seed: int) -> None:
        """Raises `QbenchError` when the architecture or a tensor is not known to allow the reordering."""
        family = source.config.get("model_type")
        if family not in FAMILIES:
            raise QbenchError(f"off_grid: {source.location} is a {family!r} model; known: {', '.join(FAMILIES)}.")
        self.source = source
        self.seed = seed
        self.location = source.location
        self.config = source.config
        self.off_grid_of = source.grid
        for name in source.tensors:
            self._axes(name)

    @property
    def revision(self) -> str:
        return f"{self.source.revision}-offgrid{self.seed}"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.source.tensors

    def load(self, name: str) -> torch.Tensor:
        """The tensor of `source` with rows and columns reordered. Raises `QbenchError` on a quantized tensor."""
        tensor = self.source.load(name)
        if isinstance(tensor, QuantizedTensor):
            raise QbenchError(f"off_grid: {name} of {self.location} is quantized; only float weights can be reordered.")
        layer, axes = self._axes(name)
        for dim, axis in enumerate(axes[: tensor.ndim]):
            if axis is not None:
                tensor = tensor.index_select(dim, self._order(axis, layer))
        return tensor

    def write_side_files(self, folder: Path) -> list[str]:
        return self.source.write_side_files(folder)

    def _axes(self, name: str) -> tuple[int, tuple[str | None, str | None]]:
        """Layer of a tensor (0 outside of the blocks) and what its dimensions run over."""
        if name in OUTSIDE:
            return 0, OUTSIDE[name]
        found = BLOCK_TENSOR.fullmatch(name)
        if found is None or found[2] not in AXES:
            raise QbenchError(f"off_grid: {self.location} has a tensor that no reordering is known for: {name}.")
        return int(found[1]), AXES[found[2]]

    def _order(self, axis: str, layer: int) -> torch.Tensor:
        """The old position (int64) of each new channel of `axis` in `layer`."""
        if axis == "residual":
            return self._permutation("residual", self.config["hidden_size"])
        if axis == "inner":
            return self._permutation(f"inner {layer}", self.config["intermediate_size"])
        heads: int = self.config["num_attention_heads"]
        kv_heads: int = self.config.get("num_key_value_heads") or heads
        width: int = self.config.get("head_dim") or self.config["hidden_size"] // heads
        within = [self._permutation(f"value {layer} {head}", width) for head in range(kv_heads)]
        if axis == "value":
            return torch.cat([head * width + order for head, order in enumerate(within)])
        group = heads // kv_heads  # query heads that read one key-value head
        return torch.cat([head * width + within[head // group] for head in range(heads)])

    def _permutation(self, key: str, size: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{self.seed} {key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randperm(size, generator=generator)
