"""How far a student is from its teacher, as a loss to train the student with.

Means are over real tokens only: what `mask` leaves out (padding, a prompt) is never looked at, so it may even be NaN.
All is computed in float32. The teacher gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

from qbench.errors import QbenchError


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> torch.Tensor:
    """``KL(teacher || student)`` of both softened by `temperature` T, times T^2, in nats a token (arXiv 1503.02531).

    Logits are ``[..., vocabulary]``; `mask` ``[...]`` is true (or not 0) where a token counts. With `top_k` both
    distributions are those over the teacher's k likeliest tokens alone. Raises `QbenchError` when shapes differ,
    no token counts, or a setting is out of range.
    """
    if not temperature > 0:
        raise QbenchError(f"distillation: temperature is {temperature}; allowed: above 0.")
    student, teacher = _counted(student, teacher, mask)
    if top_k is not None:
        if not 1 <= top_k <= teacher.shape[-1]:
            raise QbenchError(f"distillation: top_k is {top_k}; allowed: 1 to the vocabulary's {teacher.shape[-1]}.")
        teacher, likeliest = teacher.topk(top_k)
        student = student.gather(-1, likeliest)
    target = (teacher / temperature).log_softmax(-1)
    found = (student / temperature).log_softmax(-1)
    divergence = functional.kl_div(found, target, reduction="batchmean", log_target=True)
    return divergence * temperature**2


def hidden_state_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    kind: Literal["cosine", "mse"] = "cosine",
) -> torch.Tensor:
    """Mean of ``1 - cos(student, teacher)`` or of the squared difference of hidden states ``[..., hidden]``.

    Meant for what norms put out. A student of another width is projected to the teacher's first. `mask` and errors
    are as in `distillation_loss`.
    """
    if kind not in ("cosine", "mse"):
        raise QbenchError(f"distillation: kind is {kind!r}; allowed: cosine, mse.")
    student, teacher = _counted(student, teacher, mask)
    if kind == "mse":
        return functional.mse_loss(student, teacher)
    return (1 - functional.cosine_similarity(student, teacher, dim=-1)).mean()


def mix_losses(
    logits: torch.Tensor,
    hidden: Sequence[torch.Tensor] = (),
    language: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """One loss of scalars whose sizes have nothing to do with each other.

    The mean of the `hidden` losses is brought to the size of the `logits` loss and added to it. With a `language`
    modelling loss the sum is brought to that one's size, multiplied by `scale` and added to it. A loss of 0 stays 0.
    """
    mixed = logits
    if hidden:
        mixed = mixed + _sized_as(torch.stack(list(hidden)).mean(), logits)
    if language is not None:
        mixed = language + scale * _sized_as(mixed, language)
    return mixed


def _counted(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as float32 ``[tokens, n]``, only the tokens that count."""
    if student.shape != teacher.shape:
        raise QbenchError(
            f"distillation: the student's {tuple(student.shape)} and the teacher's {tuple(teacher.shape)} differ."
        )
    keep = torch.ones(student.shape[:-1], dtype=torch.bool, device=student.device) if mask is None else mask.bool()
    if keep.shape != student.shape[:-1]:
        raise QbenchError(f"distillation: a mask of {tuple(keep.shape)} for tokens of {tuple(student.shape[:-1])}.")
    if not bool(keep.any()):
        raise QbenchError("distillation: the mask leaves no token to take the mean of.")
    return student[keep].float(), teacher.detach()[keep].float()


def _sized_as(loss: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`loss` with the value of `other` and its own gradient's direction; 0 stays 0."""
    size = loss.detach()
    return loss * torch.where(size > 0, other.detach() / size, 0.0)
