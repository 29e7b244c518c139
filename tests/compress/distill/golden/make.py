"""Writes modelopt.json: values of NVIDIA modelopt's distillation losses (``pip install nvidia-modelopt==0.47.0``).

Its losses for Megatron are plain torch code in a module that imports Megatron; stand-ins are enough to import it.
"""

import importlib
import json
import math
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from modelopt.torch.distill.losses import LogitsDistillationLoss

for name in ("megatron", *(f"megatron.core{part}" for part in ("", ".pipeline_parallel", ".transformer", ".utils"))):
    sys.modules[name] = types.ModuleType(name)
sys.modules["megatron.core.pipeline_parallel.schedules"] = MagicMock()
sys.modules["megatron.core"].parallel_state = MagicMock()
sys.modules["megatron.core.utils"].get_model_config = MagicMock()
sys.modules["megatron.core.transformer"].MegatronModule = torch.nn.Module
sys.modules["megatron.core.transformer"].TransformerLayer = torch.nn.Module
megatron = importlib.import_module("modelopt.torch.distill.plugins.megatron")


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.linspace(-3, 3, math.prod(shape)).mul(1 + seed).sin().mul(4).view(shape)


def logits_cases() -> list[dict[str, Any]]:
    student, teacher = logits(0, 2, 3, 40), logits(1, 2, 3, 40)
    cases = []
    for t in (1.0, 2.0, 5.0):
        loss = LogitsDistillationLoss(temperature=t, reduction="none")(student, teacher).mean()
        cases.append({"t": t, "top_k": None, "loss": float(loss)})
        for k in (1, 4, 40):
            top = megatron.TopKLogitsKLLoss(SimpleNamespace(tensor_model_parallel_size=1), temperature=t, top_k=k)
            loss = top(student, teacher)[0].mean() * t**2  # this class leaves the factor T^2 to its caller
            cases.append({"t": t, "top_k": k, "loss": float(loss)})
    return cases


def mixed_cases() -> list[dict[str, Any]]:
    cases = []
    for hidden in ([], [0.25], [0.1, 0.4], [0.0]):
        for language, scale in ((None, 1.0), (2.5, 1.0), (2.5, 0.3)):
            value = torch.tensor(0.8, requires_grad=True)
            balance = megatron.LogitsAndIntermediatesLossBalancer(scale, skip_original_loss=language is None)
            losses = {f"Hidden{i}": torch.tensor(loss) for i, loss in enumerate(hidden)}
            original = torch.tensor(language or 0.0)
            given = {megatron.mtd.loss_balancers.STUDENT_LOSS_KEY: original, "LogitsKL": value * 1.0, **losses}
            mixed = balance(given)["kd_loss"]
            mixed.backward()
            cases.append(
                {"logits": 0.8, "hidden": hidden, "language": language, "scale": scale}
                | {"loss": float(mixed), "gradient": float(value.grad)}
            )
    return cases


content = {"logits": logits_cases(), "mixed": mixed_cases()}
Path(__file__).with_name("modelopt.json").write_text(json.dumps(content, indent=1) + "\n")
