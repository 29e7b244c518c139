"""What the libraries' workers share: the job, the model, and how a quantized layer is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Work:
    """What a library is asked to do; the parent's `qbench.peers.base.PeerJob` as it arrives."""

    library: str
    method: str
    options: dict[str, Any]
    model: str  # a Hugging Face folder of floats
    modules: list[str]  # the linears to quantize; every other weight stays
    rows: list[list[int]]
    device: str
    seed: int


@dataclass(frozen=True)
class Layer:
    """A linear as the library left it: the dense weight it stands for, and what storing it takes."""

    weight: torch.Tensor  # float32 [out, in]
    nbytes: int  # codes, scales and what else is needed to decode them
    activation: dict[str, Any] | None = None  # how its input is rounded, in the library's own words
    input_scale: float | None = None  # of a static activation format: value = code * input_scale
    smoothing: torch.Tensor | None = None  # [in]: what the input is multiplied by before it is rounded


def load_model(work: Work) -> nn.Module:
    """The float32 model of `work` by transformers, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    return model.eval().to(work.device)


def outside(work: Work, model: nn.Module) -> list[str]:
    """Names of the model's linears that `work` does not ask for."""
    asked = set(work.modules)
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in asked]


def row_tensors(work: Work) -> list[torch.Tensor]:
    """The calibration rows, each ``[1, n]`` int64 on the model's device."""
    return [torch.tensor([row], dtype=torch.long, device=work.device) for row in work.rows]


def forward_all(work: Work) -> Callable[[nn.Module], None]:
    """A loop over the rows, for libraries that calibrate by a forward loop."""

    def loop(model: nn.Module) -> None:
        with torch.inference_mode():
            for row in row_tensors(work):
                model(row)

    return loop


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of `tensors` as they are stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def code_bytes(weight: torch.Tensor, bits: int) -> int:
    """Bytes of one code of `bits` for each value of a weight."""
    return -(-weight.numel() * bits // 8)
