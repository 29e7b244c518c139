"""Models and steps for runtime tests, all in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from qbench.formats.base import QuantizedTensor
from qbench.models.source import ModelSource, TensorInfo
from qbench.runtime.runner import ModelRunner
from qbench.runtime.scheduler import ScheduledRequest, ScheduledStep


class MemorySource(ModelSource):
    """A source over tensors in memory; some may be quantized."""

    location = "memory"

    def __init__(self, config: dict[str, Any], held: dict[str, torch.Tensor | QuantizedTensor]) -> None:
        self.config = config
        self.held = held

    @property
    def revision(self) -> str:
        return "memory"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), "F32", t.nbytes) for name, t in self.held.items()}

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        return self.held[name]

    def write_side_files(self, folder: Path) -> list[str]:
        return []


def random_model(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """A transformers model with weights large enough that a mistake shows, biases and norms included."""
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else 0.15 * noise
    return model


def source_of(
    model: torch.nn.Module, quantize: Callable[[str, torch.Tensor], torch.Tensor | QuantizedTensor] | None = None
) -> MemorySource:
    """The model's tensors as a source; `quantize` may turn some into quantized ones."""
    held: dict[str, torch.Tensor | QuantizedTensor] = {k: v.clone() for k, v in model.state_dict().items()}
    config: Any = model.config
    if config.tie_word_embeddings:
        del held["lm_head.weight"]
    if quantize is not None:
        held = {name: quantize(name, tensor) for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    return MemorySource(config.to_dict() | {"architectures": [type(model).__name__]}, held)


def make_runner(source: ModelSource, num_blocks: int = 64, block_size: int = 4) -> ModelRunner:
    return ModelRunner(
        source, dtype=torch.float32, device=torch.device("cpu"), num_blocks=num_blocks, block_size=block_size
    )


def scheduled(
    name: str, token_ids: list[int], start: int, block_table: list[int], samples: bool = True
) -> ScheduledRequest:
    return ScheduledRequest(name, token_ids, start, block_table, samples)


def logits_in_chunks(
    runner: ModelRunner, token_ids: list[int], chunks: list[int], block_table: list[int]
) -> torch.Tensor:
    """Logits ``[len(token_ids), vocab]`` of one request computed alone in `chunks` of the given lengths."""
    assert sum(chunks) == len(token_ids)
    rows, start = [], 0
    for length in chunks:
        piece = scheduled("r", token_ids[start : start + length], start, block_table)
        rows.append(runner.logits(runner.execute(ScheduledStep([piece]))))
        start += length
    return torch.cat(rows)
