"""Statistics against transformers' own padded batches: the rows are never padded here, and pads count nowhere there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.calibration.batches import token_batches
from qbench.calibration.channels import ChannelStatistics
from qbench.calibration.hessian import InputStatistics
from qbench.compress.imatrix import collect_imatrix
from qbench.models.source import open_model

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj")
PAD = 2


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (5, 9, 16, 12)]


def inputs_of(folder: Path, side: str) -> dict[str, torch.Tensor]:
    """What goes into each of `LAYERS` at the real tokens of one batch of four, padded on a side; float64."""
    width = max(map(len, rows()))
    ids, mask = torch.full((4, width), PAD), torch.zeros(4, width, dtype=torch.long)
    for i, row in enumerate(rows()):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    seen: dict[str, torch.Tensor] = {}
    for name in LAYERS:

        def note(_: torch.nn.Module, args: Any, name: str = name) -> None:
            seen[name] = args[0][mask.bool()]

        model.get_submodule(name).register_forward_pre_hook(note)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions)
    return seen


@pytest.mark.trap(12)
@pytest.mark.parametrize("side", ["left", "right"])
def test_statistics_are_those_of_a_padded_batch_without_its_pads(tiny_llama: Path, side: str) -> None:
    found = collect_imatrix(open_model(tiny_llama), rows())
    for name, inputs in inputs_of(tiny_llama, side).items():
        entry = found.entries[name]
        assert entry.tokens == len(inputs) == 42
        torch.testing.assert_close(entry.total.double(), inputs.square().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.trap(12)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_collector_counts_the_real_tokens_and_no_other(tiny_llama: Path, side: str) -> None:
    """The same activations, given to the collectors row by row and all at once."""
    for inputs in inputs_of(tiny_llama, side).values():
        together, apart = (InputStatistics(inputs.shape[1], torch.device("cpu")) for _ in range(2))
        channels, single = (ChannelStatistics(inputs.shape[1], 42, torch.device("cpu")) for _ in range(2))
        for statistics in (together, channels):
            statistics.add(inputs[None])
        for part in inputs.split([5, 9, 16, 12]):
            apart.add(part)
            single.add(part)
        assert together.tokens == apart.tokens == channels.tokens == single.tokens == 42
        torch.testing.assert_close(together.hessian("x"), apart.hessian("x"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(channels.mean_abs("x"), single.mean_abs("x"), rtol=1e-5, atol=1e-5)
        assert torch.equal(channels.max_abs, single.max_abs)
        assert torch.equal(channels.sample, single.sample)


def test_batches_hold_every_row_once_and_never_a_pad() -> None:
    lengths = [3, 5, 3, 4096, 5, 3, 1]
    made = [list(range(i, i + length)) for i, length in enumerate(lengths)]
    batches = token_batches(made)
    assert [tuple(batch.shape) for batch in batches] == [(1, 4096), (2, 5), (3, 3), (1, 1)]
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(made)
