"""Reading GPTQ folders made by others, and refusing broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench.errors import QbenchError
from qbench.export.gptq import read
from qbench.formats.base import QuantizedTensor
from qbench.models.source import open_model

GOLDEN = load_file(Path(__file__).parent / "golden" / "gptqmodel.safetensors")
CASES = sorted({name.partition(".")[0] for name in GOLDEN})
MODULE = "model.layers.0.mlp.up_proj"


def folder_of(folder: Path, case: str, config: dict[str, Any] | None = None, **changed: torch.Tensor | None) -> Path:
    """A folder that holds one golden linear; `changed` parts replace (or, None, remove) the stored ones."""
    parts = {part: GOLDEN[f"{case}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")} | changed
    folder.mkdir(exist_ok=True)
    tensors = {f"{MODULE}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    bits, _, _, checkpoint_format = case.split("-")
    quantization = {"quant_method": "gptq", "bits": int(bits[1:]), "group_size": 32,
                    "checkpoint_format": checkpoint_format} | (config or {})  # fmt: skip
    stated = {"tie_word_embeddings": True, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.trap(18)
@pytest.mark.trap(19)
@pytest.mark.trap(20)
@pytest.mark.trap(21)
def test_linears_packed_by_gptqmodel(tmp_path: Path, case: str) -> None:
    source = open_model(folder_of(tmp_path, case))
    assert set(source.tensors) == {f"{MODULE}.weight", "model.norm.weight"}
    assert source.tensors[f"{MODULE}.weight"].shape == (32, 64)
    weight = source.load(f"{MODULE}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize().half(), GOLDEN[f"{case}.weight"])
    assert weight.format.to_dict()["symmetric"] == ("-sym-" in case)
    assert ("g_idx" in weight.parts) == ("-act-" in case)
    assert "quantization_config" not in source.config


def test_g_idx_may_be_absent(tmp_path: Path) -> None:
    weight = read(str(folder_of(tmp_path, "b4-sym-plain-gptq", g_idx=None))).load(f"{MODULE}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize().half(), GOLDEN["b4-sym-plain-gptq.weight"])


def test_scales_in_another_dtype_keep_their_values(tmp_path: Path) -> None:
    scales = GOLDEN["b4-sym-plain-gptq.scales"].float()
    weight = read(str(folder_of(tmp_path, "b4-sym-plain-gptq", scales=scales))).load(f"{MODULE}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize().half(), GOLDEN["b4-sym-plain-gptq.weight"])


def test_older_folders_keep_the_configuration_in_a_file_of_its_own(tmp_path: Path) -> None:
    case = "b4-asym-act-gptq"
    folder = folder_of(tmp_path, case)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    stated = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "is_marlin_format": False}
    (folder / "quantize_config.json").write_text(json.dumps(stated))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    weight = open_model(folder).load(f"{MODULE}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize().half(), GOLDEN[f"{case}.weight"])


def test_dynamic_patterns_override_bits(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "b8-sym-plain-gptq", {"bits": 4, "dynamic": {r"+:.*up_proj$": {"bits": 8}}})
    weight = read(str(folder)).load(f"{MODULE}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize().half(), GOLDEN["b8-sym-plain-gptq.weight"])


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({}, {"qzeros": None}, f"{MODULE}.qzeros is missing"),
        ({}, {"scales": None}, f"{MODULE}.scales is missing"),
        ({}, {"qweight": None}, f"{MODULE}.qweight is missing"),
        ({}, {"qzeros": torch.zeros(2, 5, dtype=torch.int32)}, r"qzeros is I32 \[2, 5\]; expected I32 \[2, 4\]"),
        ({}, {"scales": torch.ones(3, 32).half()}, r"scales is F16 \[3, 32\]; expected .* \[2, 32\]"),
        ({}, {"qweight": torch.zeros(8, 32)}, r"qweight is F32"),
        ({}, {"qweight": torch.zeros(8, dtype=torch.int32)}, r"qweight has shape \[8\]"),
        ({}, {"g_idx": torch.zeros(63, dtype=torch.int32)}, r"g_idx is I32 \[63\]; expected I32 \[64\]"),
        ({"bits": 8}, {}, "qzeros is|g_idx is"),
        ({"bits": 5}, {}, "bits of .* are 5; allowed"),
        ({"bits": "4"}, {}, "bits of .* are '4'"),
        ({"group_size": 0}, {}, "group_size of .* is 0"),
        ({"group_size": 64}, {}, r"\[2, 4\]; expected I32 \[1, 4\]"),
        ({"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin' cannot be read"),
        ({"dynamic": []}, {}, None),
        ({"dynamic": ["x"]}, {}, "dynamic is"),
        ({"dynamic": {"+:(": {"bits": 8}}}, {}, "pattern .* is invalid"),
    ],
)
def test_broken_folders_are_refused_when_opened(
    tmp_path: Path, config: dict[str, Any], changed: dict[str, torch.Tensor | None], message: str | None
) -> None:
    folder = folder_of(tmp_path, "b4-asym-plain-gptq", config, **changed)
    if message is None:
        read(str(folder))
        return
    with pytest.raises(QbenchError, match=message) as error:
        read(str(folder))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("bad", [-1, 2, 2**31 - 1])
def test_a_g_idx_outside_the_groups_is_refused(tmp_path: Path, bad: int) -> None:
    g_idx = GOLDEN["b4-sym-plain-gptq.g_idx"].clone()
    g_idx[7] = bad
    source = read(str(folder_of(tmp_path, "b4-sym-plain-gptq", g_idx=g_idx)))
    with pytest.raises(QbenchError, match="there are 2"):
        source.load(f"{MODULE}.weight")


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    scales = GOLDEN["b4-sym-plain-gptq.scales"].clone()
    scales[0, 3] = float("nan")
    with pytest.raises(QbenchError, match="infinite or undefined"):
        read(str(folder_of(tmp_path, "b4-sym-plain-gptq", scales=scales))).load(f"{MODULE}.weight")
