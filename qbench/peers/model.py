"""A model on its way to another library and back: a plain folder of floats there, a compressed model here."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from qbench.errors import QbenchError
from qbench.formats.activation import INPUT_SCALE, activation_from_dict
from qbench.formats.base import QuantizedTensor
from qbench.formats.dense import SMOOTHING, Dense
from qbench.models.compressed import CompressedModel, CompressedWriter
from qbench.models.huggingface import open_huggingface
from qbench.models.safetensors_writer import write_safetensors
from qbench.models.source import ModelSource
from qbench.models.structure import linear_names
from qbench.peers.base import PeerJob
from qbench.peers.choice import Choice

FACTS = "peer.json"  # in the compressed model's folder: who made it, and how


def run_peer(
    source: ModelSource, choice: Choice, rows: list[list[int]], folder: Path, *, device: str, seed: int, label: str
) -> tuple[CompressedModel, dict[str, Any]]:
    """`source` as `choice` compresses it over calibration `rows`, in `folder`, and the library's facts.

    Every linear of the decoder blocks but routers is compressed. Work lies beside it in ``FOLDER.peer``, of which the
    library's log stays when it fails. Raises `QbenchError` when it does, or when what it made does not fit the model.
    """
    work = folder.with_name(folder.name + ".peer").absolute()
    shutil.rmtree(work, ignore_errors=True)
    write_floats(source, work / "model")
    modules = linear_names(source.tensors, source.config)
    facts = PeerJob(choice, work / "model", list(source.tensors), modules, rows, device, seed).run(work, label)
    model = _bring_back(source, facts, work, folder)
    shutil.rmtree(work)
    return model, facts


def write_floats(source: ModelSource, folder: Path) -> None:
    """`source` as a Hugging Face folder of float weights that transformers loads, in its own dtypes, decoded where it
    is quantized."""
    folder.mkdir(parents=True)
    source.write_side_files(folder)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {name: source.load_dense(name) for name in source.tensors}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def bits_per_weight(facts: dict[str, Any], source: ModelSource) -> float:
    """Bytes of the library's codes and scales over the weights they stand for, in bits."""
    weights = sum(math.prod(source.tensors[f"{name}.weight"].shape) for name in facts["modules"])
    stored: int = sum(module["nbytes"] for module in facts["modules"].values())
    return 8 * stored / weights


def made_by(facts: dict[str, Any]) -> str:
    """The library and its version, for people."""
    return f"{facts['library']} {facts['version']}"


def _bring_back(source: ModelSource, facts: dict[str, Any], work: Path, folder: Path) -> CompressedModel:
    made = work / "made"
    made.mkdir()
    (work / "weights.safetensors").rename(made / "model.safetensors")
    shutil.copy(work / "model" / "config.json", made / "config.json")
    returned = open_huggingface(str(made))
    tensors: dict[str, torch.Tensor | QuantizedTensor] = {}
    for name, info in source.tensors.items():
        tensor = returned.load(name)
        if tuple(tensor.shape) != info.shape or not bool(torch.isfinite(tensor).all()):
            raise QbenchError(f"{made_by(facts)}: {name} came back as {list(tensor.shape)}, or not finite.")
        of_module = facts["modules"].get(name.removesuffix(".weight"))
        smoothing = name.removesuffix("weight") + SMOOTHING
        smoothed = returned.load(smoothing) if smoothing in returned.tensors else None
        tensors[name] = _restored(tensor, smoothed, of_module) if of_module else tensor
    writer = CompressedWriter(work / "compressed", 1)
    writer.write_shard(0, tensors)
    writer.finish(source, dict(source.config))
    (work / "compressed" / FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    (work / "compressed").rename(folder)
    return CompressedModel(folder)


def _restored(
    weight: torch.Tensor, smoothing: torch.Tensor | None, facts: dict[str, Any]
) -> torch.Tensor | QuantizedTensor:
    """The dense weight, with the format its input is rounded in, if it is."""
    if facts["activation"] is None:
        return weight
    activation = activation_from_dict(facts["activation"])
    parts = {"weight": weight}
    if activation.static:
        parts[INPUT_SCALE] = torch.tensor([[facts["input_scale"]]], dtype=torch.float32)
    if smoothing is not None:
        parts[SMOOTHING] = smoothing
    return QuantizedTensor(Dense(), (weight.shape[0], weight.shape[1]), parts, activation)
