"""GPTQ folders as transformers with gptqmodel, and gptqmodel itself, load them: equal weights, equal logits.

The judge runs in the interpreter that QBENCH_ORACLES_PYTHON names, else in this one; without gptqmodel there, these
tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench.export.gptq import write
from qbench.formats.base import Format
from qbench.formats.integer import Integer
from qbench.models.source import open_model
from tests.export.quantized import QuantizedSource
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.oracle
SCRIPT = Path(__file__).parents[2] / "export" / "check_gptq.py"
INT4 = Integer(bits=4, group_size=32)


def some_dense(name: str) -> Format | None:
    return None if "layers.1." in name or "down_proj" in name else INT4


def mixed(name: str) -> Format | None:
    if "layers.1.self_attn" in name:
        return None
    return Integer(bits=8, granularity="channel") if "down_proj" in name else INT4


LOADABLE = {
    "int4-asymmetric-act-order": (lambda name: Integer(bits=4, group_size=32, symmetric=False), True),
    "int8-row": (lambda name: Integer(bits=8, granularity="channel", full_range=False), False),
    "int3": (lambda name: Integer(bits=3, group_size=32), False),
    "int2-asymmetric-v2": (lambda name: Integer(bits=2, group_size=16, symmetric=False), False),
    "int4-some-dense": (some_dense, False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of a tiny model whose attention biases are not zero."""
    root = tmp_path_factory.mktemp("gptq")
    weights = make_tiny_llama(root / "model", attention_bias=True) / "model.safetensors"
    tensors = load_file(weights)
    biases = {name: torch.linspace(-1, 1, t.numel()) for name, t in tensors.items() if name.endswith(".bias")}
    save_file(tensors | biases, weights, metadata={"format": "pt"})
    source = open_model(root / "model")
    for name, (choose, act_order) in (LOADABLE | {"mixed": (mixed, False)}).items():
        write(QuantizedSource(source, choose, act_order), root / name)
    return {name: root / name for name in (*LOADABLE, "mixed")}


def judged(*arguments: Path | str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert all(one["ok"] for one in found) == (done.returncode == 0)
    return found


@pytest.mark.trap(5)
@pytest.mark.trap(18)
@pytest.mark.trap(21)
def test_transformers_computes_the_same_unless_modules_differ_in_bits(folders: dict[str, Path]) -> None:
    *found, found_mixed = judged(*folders.values())
    for one in found:
        assert one["ok"], one
    assert [one["quantized_linears"] for one in found] == [21] * 4 + [12]
    config = json.loads((folders["int2-asymmetric-v2"] / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    assert not found_mixed["ok"]
    assert all("down_proj" in name for name in found_mixed["unequal_weights"])


def test_gptqmodel_follows_overrides_that_transformers_ignores(folders: dict[str, Path]) -> None:
    (found,) = judged("--loader", "gptqmodel", folders["mixed"])
    assert found["ok"], found
    assert found["quantized_linears"] == 17
