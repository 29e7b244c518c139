"""Every library for real, once, on a tiny random model: its weights come back near the model's, on as few levels as its
bits allow. gptqmodel runs in the interpreter that QBENCH_ORACLES_PYTHON names, the others in those of their
QBENCH_PEER_PYTHON_<LIBRARY>, else in this one; without a library there, its tests fail."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from qbench.formats.base import QuantizedTensor
from qbench.models.source import open_model
from qbench.peers.choice import read_choice
from qbench.peers.model import bits_per_weight, run_peer
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.oracle
NAME = "model.layers.1.mlp.down_proj.weight"
GROUP = 32
# library, method and options: bits per weight, largest error over the weights' size, levels a group, input format
CASES: list[tuple[dict[str, Any], float, float, int, str | None]] = [
    ({"library": "gptqmodel", "group_size": GROUP}, 4.5, 0.16, 16, None),
    ({"library": "gptqmodel", "group_size": GROUP, "sym": False, "desc_act": True}, 4.9, 0.16, GROUP, None),
    ({"library": "llmcompressor", "group_size": GROUP}, 5.0, 0.16, 16, None),
    ({"library": "llmcompressor", "method": "smoothquant"}, 8.23, 0.01, 256, "int8"),
    ({"library": "llmcompressor", "method": "rounding", "scheme": "FP8"}, 8.01, 0.03, 256, "fp8"),
    ({"library": "llmcompressor", "method": "rounding", "scheme": "NVFP4"}, 4.51, 0.11, GROUP, "nvfp4"),
    ({"library": "auto-round", "group_size": GROUP, "iters": 5}, 4.5, 0.16, 16, None),
    ({"library": "bitsandbytes", "method": "nf4"}, 4.5, 0.11, 16, None),
    ({"library": "bitsandbytes", "method": "llm-int8"}, 8.23, 0.01, 256, "llm-int8"),
    ({"library": "hqq", "group_size": GROUP}, 5.0, 0.11, 16, None),
    ({"library": "modelopt", "method": "int4_blockwise_weight_only", "block_size": GROUP}, 5.0, 0.11, 16, None),
    ({"library": "modelopt", "method": "fp8"}, 8.01, 0.03, 256, "fp8"),
    ({"library": "modelopt", "method": "nvfp4_weight_only"}, 4.51, 0.11, GROUP, None),
]


def _name(value: Any) -> str:
    return "-".join(str(option) for option in value.values()) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("asked", "bits", "error", "levels", "inputs"), CASES, ids=_name)
def test_a_library_for_real(
    asked: dict[str, Any],
    bits: float,
    error: float,
    levels: int,
    inputs: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "QBENCH_ORACLES_PYTHON" in os.environ:
        monkeypatch.setenv("QBENCH_PEER_PYTHON_GPTQMODEL", os.environ["QBENCH_ORACLES_PYTHON"])
    source = open_model(make_tiny_llama(tmp_path / "tiny", hidden_size=128, intermediate_size=256))
    draw = random.Random(0)
    rows = [[draw.randrange(3, 300) for _ in range(64)] for _ in range(8)]
    choice = read_choice(asked)
    model, facts = run_peer(source, choice, rows, tmp_path / "made", device="cpu", seed=0, label=choice.library.name)
    assert facts["version"] == choice.version
    assert bits_per_weight(facts, source) == pytest.approx(bits, abs=0.06)
    weight, activation = model.load(NAME), None
    if isinstance(weight, QuantizedTensor):
        activation, weight = weight.activation, weight.dequantize()
    original = source.load(NAME)
    assert isinstance(original, torch.Tensor)
    assert (weight - original).norm() / original.norm() < error
    assert (activation.name if activation else None) == inputs
    assert max(len(group.unique()) for group in weight.reshape(-1, GROUP)[:64]) <= levels
    assert torch.equal(model.load("model.embed_tokens.weight"), source.load("model.embed_tokens.weight"))
