"""Mixture-of-experts blocks with a linear for each expert, so that experts are compressed like any other linear.

Transformers holds all experts of a block in two three-dimensional parameters; checkpoints hold one weight for each
expert and projection. `split_experts` puts the checkpoint's form back, with the checkpoint's names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}  # gate, up, down as checkpoints of the family call them
BLOCKS = {"mixtral": "block_sparse_moe"}  # what the checkpoints of the family call the module that holds them
USUAL = ("gate_proj", "up_proj", "down_proj")


class Expert(nn.Module):
    """One gated expert."""

    def __init__(self, hidden: int, inner: int, act_fn: Any, names: tuple[str, str, str]) -> None:
        super().__init__()
        gate, up, down = names
        self.add_module(gate, nn.Linear(hidden, inner, bias=False))
        self.add_module(up, nn.Linear(hidden, inner, bias=False))
        self.add_module(down, nn.Linear(inner, hidden, bias=False))
        self._names = names
        self._act = [act_fn]  # in a list: the activation is the block's own module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        result: torch.Tensor = down(self._act[0](gate(x)) * up(x))
        return result


class SplitExperts(nn.ModuleList):
    """The experts of a block as a list; called as transformers calls its own."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Tokens ``[T, hidden]``, the experts chosen for each ``[T, k]`` and their weights ``[T, k]``."""
        total = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            tokens, choice = torch.where(top_k_index == index)
            if len(tokens):
                output = expert(hidden_states[tokens]) * top_k_weights[tokens, choice, None]
                total.index_add_(0, tokens, output.to(total.dtype))
        return total


def split_experts(model: nn.Module, model_type: str) -> None:
    """Replaces every module of fused experts (``gate_up_proj`` ``[experts, 2 * inner, hidden]``) in `model`."""
    names = PROJECTIONS.get(model_type, USUAL)
    for path, module in list(model.named_modules()):
        fused = getattr(module, "gate_up_proj", None)
        if not isinstance(fused, nn.Parameter) or fused.dim() != 3 or hasattr(module, "gate_up_proj_bias"):
            continue
        count, inner, hidden = fused.shape[0], fused.shape[1] // 2, fused.shape[2]
        experts = SplitExperts(Expert(hidden, inner, module.act_fn, names) for _ in range(count))
        owner, _, key = path.rpartition(".")
        setattr(model.get_submodule(owner), key, experts)
        if model_type in BLOCKS:
            layer, _, key = owner.rpartition(".")
            _rename(model.get_submodule(layer), key, BLOCKS[model_type])


def _rename(owner: nn.Module, old: str, new: str) -> None:
    """Parameters get the new name; the module's own code still finds it under the old one."""
    module = owner._modules.pop(old)
    owner.add_module(new, module)
    owner.__dict__[old] = module
