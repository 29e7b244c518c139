"""The part of validation that is about the model's own code: whether transformers builds it from config.json, and
whether what a recipe compresses are linears in it."""

from __future__ import annotations

from collections.abc import Iterable

from qbench.errors import QbenchError
from qbench.models.source import ModelSource


def check_code(source: ModelSource, modules: Iterable[str]) -> list[str]:
    """What is wrong, in sentences. The model is built without weights, which takes seconds and little memory."""
    import torch

    from qbench.compress.skeleton import Skeleton

    try:
        skeleton = Skeleton(source, torch.device("cpu"))
    except QbenchError as error:
        return [str(error)]
    wrong = []
    for name in modules:
        try:
            skeleton.linear(name)
        except QbenchError as error:
            wrong.append(str(error))
    return wrong
