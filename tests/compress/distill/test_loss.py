"""Distillation losses against torch's own and against NVIDIA modelopt's values for the same tensors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import qbench
from qbench.compress.distill.loss import distillation_loss, hidden_state_loss, mix_losses
from qbench.errors import QbenchError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "modelopt.json").read_text())


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.linspace(-3, 3, math.prod(shape)).mul(1 + seed).sin().mul(4).view(shape)


def test_public_name() -> None:
    assert qbench.distillation_loss is distillation_loss


@pytest.mark.parametrize("case", GOLDEN["logits"], ids=str)
def test_agrees_with_modelopt(case: dict[str, Any]) -> None:
    """Made with modelopt 0.47's LogitsDistillationLoss and TopKLogitsKLLoss (`golden/make.py`)."""
    found = distillation_loss(logits(0, 2, 3, 40), logits(1, 2, 3, 40), temperature=case["t"], top_k=case["top_k"])
    assert float(found) == pytest.approx(case["loss"], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_agrees_with_torch_in_float64_and_in_its_gradient(temperature: float) -> None:
    student, teacher = logits(0, 7, 50).requires_grad_(), logits(2, 7, 50)
    wide = student.detach().double().requires_grad_()
    expected = temperature**2 * functional.kl_div(
        (wide / temperature).log_softmax(-1), (teacher.double() / temperature).softmax(-1), reduction="batchmean"
    )
    expected.backward()
    found = distillation_loss(student, teacher, temperature=temperature)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(student.grad.double(), wide.grad, rtol=1e-3, atol=1e-7)


def test_equal_models_have_no_loss_and_a_teacher_no_gradient() -> None:
    teacher = logits(0, 5, 20).requires_grad_()
    student = logits(0, 5, 20).requires_grad_()
    loss = distillation_loss(student, teacher)
    assert abs(loss.item()) < 1e-6
    loss.backward()
    assert teacher.grad is None
    assert student.grad.abs().max() < 1e-7


def test_half_precision_logits_are_widened_first() -> None:
    student, teacher = (logits(seed, 4, 3000).to(torch.bfloat16) for seed in (0, 1))
    found = distillation_loss(student, teacher, temperature=2.0)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(distillation_loss(student.double(), teacher.double(), temperature=2.0)))


@pytest.mark.trap(25)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str, tiny_llama: Path) -> None:
    """A whole student and teacher: rows of unequal lengths one by one, and in one padded batch."""
    teacher = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.05 * weight.std(correction=0) * torch.sin(torch.arange(weight.numel()).view_as(weight)))
    rows = [list(range(10, 10 + n)) for n in (5, 9, 14)]

    def both(ids: torch.Tensor, **kwargs: torch.Tensor) -> list[torch.Tensor]:
        outputs = [model(ids, output_hidden_states=True, **kwargs) for model in (student, teacher)]
        return [outputs[0].logits, outputs[1].logits, *(out.hidden_states[-1] for out in outputs)]

    with torch.no_grad():
        alone = [both(torch.tensor([row])) for row in rows]
        flat = [torch.cat([found[i][0] for found in alone]) for i in range(4)]
        padded, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
        for i, row in enumerate(rows):
            place = slice(20 - len(row), 20) if side == "left" else slice(0, len(row))
            padded[i, place], mask[i, place] = torch.tensor(row), 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        batch = both(padded, attention_mask=mask, position_ids=positions)
    batch[0][mask == 0] = torch.nan  # what stands at padding is never looked at
    for options in ({}, {"temperature": 2.0}, {"top_k": 8}):
        expected = distillation_loss(flat[0], flat[1], **options)
        assert float(expected) > 1e-3
        assert float(distillation_loss(batch[0], batch[1], mask, **options)) == pytest.approx(float(expected), rel=1e-4)
    for kind in ("cosine", "mse"):
        expected = hidden_state_loss(flat[2], flat[3], kind=kind)
        assert float(expected) > 0
        assert float(hidden_state_loss(batch[2], batch[3], mask, kind=kind)) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.trap(25)
def test_padding_that_is_nan_sends_no_gradient() -> None:
    student, teacher = logits(0, 2, 4, 10), logits(1, 2, 4, 10)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    student[mask == 0] = torch.nan
    student.requires_grad_()
    distillation_loss(student, teacher, mask).backward()
    assert bool((student.grad[mask == 0] == 0).all())
    assert bool((student.grad[mask == 1] != 0).any())
    assert bool(torch.isfinite(student.grad).all())


def test_hidden_states_against_torch() -> None:
    student, teacher = logits(0, 6, 32), logits(3, 6, 32)
    cosine = functional.cosine_embedding_loss(student, teacher, torch.ones(1))
    assert float(hidden_state_loss(student, teacher)) == pytest.approx(float(cosine), rel=1e-5)
    assert float(hidden_state_loss(student, teacher, kind="mse")) == pytest.approx(
        float((student - teacher).square().mean()), rel=1e-6
    )


@pytest.mark.parametrize("case", GOLDEN["mixed"], ids=str)
def test_mixing_agrees_with_modelopt(case: dict[str, Any]) -> None:
    """Made with modelopt 0.47's LogitsAndIntermediatesLossBalancer."""
    given = [torch.tensor(value, requires_grad=True) for value in case["hidden"]]
    language = None if case["language"] is None else torch.tensor(case["language"])
    logits_loss = torch.tensor(case["logits"], requires_grad=True)
    found = mix_losses(logits_loss, given, language, scale=case["scale"])
    assert found.item() == pytest.approx(case["loss"], rel=1e-6)
    found.backward()
    assert logits_loss.grad.item() == pytest.approx(case["gradient"], rel=1e-6)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: distillation_loss(logits(0, 3, 9), logits(0, 3, 8)), "(3, 9) and the teacher's (3, 8) differ"),
        (lambda: distillation_loss(logits(0, 3, 9), logits(0, 3, 9), torch.zeros(3)), "no token"),
        (lambda: distillation_loss(logits(0, 3, 9), logits(0, 3, 9), torch.ones(4)), "a mask of (4,)"),
        (lambda: distillation_loss(logits(0, 3, 9), logits(0, 3, 9), top_k=10), "1 to the vocabulary's 9"),
        (lambda: distillation_loss(logits(0, 3, 9), logits(0, 3, 9), temperature=0.0), "temperature is 0.0"),
        (lambda: hidden_state_loss(logits(0, 3, 9), logits(0, 3, 9), kind="l1"), "allowed: cosine, mse"),
    ],
)
def test_refused(call: Any, expected: str) -> None:
    with pytest.raises(QbenchError) as caught:
        call()
    assert expected in str(caught.value)
