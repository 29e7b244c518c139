"""Perplexity and divergence against transformers' own forward pass and closed forms."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qbench.errors import QbenchError
from qbench.evaluate.divergence import ReferenceStates, kl_divergence, reference_states, summarize_divergence
from qbench.evaluate.perplexity import summarize_nll
from qbench.evaluate.score import score
from qbench.evaluate.windows import Window, windows
from tests.evaluate.fake import TransformersEngine, some_tokens, tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return tiny_engine(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    """The reference with every weight a little off."""
    other = tiny_engine(tmp_path_factory.mktemp("variant"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return other


TEXT = windows(some_tokens(150), seq_len=40, stride=25, bos=1)


def whole_log_probabilities(engine: TransformersEngine, window: Window) -> Tensor:
    """Float64 ``[num_scored, vocab]`` from one call of transformers' model."""
    with torch.inference_mode():
        logits = engine.model(torch.tensor([window.token_ids])).logits[0].double()
    return logits[window.num_context - 1 : -1].log_softmax(1)


def test_perplexity_equals_transformers(engine: TransformersEngine) -> None:
    losses = []
    for window in TEXT:
        labels = torch.tensor([window.token_ids])
        labels[:, : window.num_context] = -100
        with torch.inference_mode():
            losses.append(engine.model(torch.tensor([window.token_ids]), labels=labels).loss.item())
    found = score(engine, TEXT).perplexity
    assert found.window_nlls == pytest.approx(losses, rel=1e-6)
    sizes = [window.num_scored for window in TEXT]
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-6)
    assert found.num_tokens == sum(sizes) == 149


def test_divergence_equals_the_definition(engine: TransformersEngine, variant: TransformersEngine) -> None:
    reference = reference_states(engine, TEXT, engine.head, 300)
    found = score(variant, TEXT, reference).divergence
    assert found is not None
    kls, agree = [], []
    for window in TEXT:
        p, q = whole_log_probabilities(engine, window), whole_log_probabilities(variant, window)
        kls.append(torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(1))
        agree.append(p.argmax(1) == q.argmax(1))
    kl, top1 = torch.cat(kls), torch.cat(agree).double().mean().item()
    assert 0.01 < found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.kl_median == pytest.approx(kl.median().item(), rel=1e-4)
    assert found.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-4)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-4)
    assert found.top1_agreement == top1 < 1
    total = sum(bucket.num_positions for bucket in found.buckets)
    assert total == len(kl)
    assert sum(b.kl_mean * b.num_positions for b in found.buckets) / total == pytest.approx(found.kl_mean)


@pytest.mark.trap(60)
def test_the_reference_does_not_diverge_from_itself(engine: TransformersEngine) -> None:
    reference = reference_states(engine, TEXT, engine.head, 300)
    found = score(engine, TEXT, reference).divergence
    assert found is not None
    assert 0 <= found.kl_mean <= found.kl_max < 1e-6
    assert found.top1_agreement == 1.0


@pytest.mark.trap(60)
def test_closed_form_and_direction() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.75, 0.25]]).double().log()
    assert kl_divergence(p, q).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-9)  # 0.1438, forward
    assert kl_divergence(q, p).item() == pytest.approx(0.1308, abs=1e-4)  # reverse


@pytest.mark.trap(60)
def test_rounding_noise_is_never_negative() -> None:
    p = torch.randn(500, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(1)
    q = (p + 1e-9 * torch.randn(500, 300, generator=torch.Generator().manual_seed(1))).log_softmax(1)
    kl = kl_divergence(p, q)
    assert kl.min() >= 0
    assert kl.max() < 1e-6


@pytest.mark.trap(60)
def test_padded_vocabulary_rows_do_not_count(
    engine: TransformersEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = reference_states(engine, TEXT, engine.head, 300)
    monkeypatch.setattr(engine, "logits", lambda hidden: _padded(TransformersEngine.logits(engine, hidden)))
    found = score(engine, TEXT, narrow).divergence
    assert found is not None
    assert found.kl_max < 1e-6
    assert found.top1_agreement == 1.0


def _padded(logits: Tensor) -> Tensor:
    return torch.cat([logits, torch.full((len(logits), 4), 50.0)], 1)


@pytest.mark.trap(60)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused_with_their_place(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    text = windows(some_tokens(30), seq_len=10, stride=5)
    marked = next(iter(engine.encode([text[2].token_ids])))[7]  # predicts token 8 of window 2

    def logits(hidden: Tensor) -> Tensor:
        found = TransformersEngine.logits(engine, hidden)
        found[(hidden == marked).all(1), 3] = value
        return found

    monkeypatch.setattr(engine, "logits", logits)
    with pytest.raises(QbenchError, match="window 2 at token 8"):
        score(engine, text)


@pytest.mark.trap(59)
@pytest.mark.parametrize(("seq_len", "stride"), [(512, None), (16, None), (16, 3), (7, 1)])
@pytest.mark.parametrize("bos", [None, 1])
def test_a_zeroed_head_has_the_perplexity_of_its_vocabulary(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, seq_len: int, stride: int | None, bos: int | None
) -> None:
    monkeypatch.setattr(engine, "logits", lambda hidden: torch.zeros(len(hidden), 300))
    found = score(engine, windows(some_tokens(100), seq_len, stride, bos)).perplexity
    assert found.perplexity == pytest.approx(300, rel=1e-12)
    assert found.standard_error < 1e-12
    assert found.num_tokens == 99


def test_small_chunks_change_nothing_and_one_pass_is_enough(
    engine: TransformersEngine, variant: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_states(engine, TEXT, engine.head, 300)
    whole = score(variant, TEXT, reference)
    before = variant.passes
    monkeypatch.setattr("qbench.evaluate.score.CHUNK_BYTES", 3 * 8 * 300)
    monkeypatch.setattr("qbench.evaluate.score.CACHE_BYTES", 2 * 8 * 300)
    most = []
    monkeypatch.setattr(variant, "logits", lambda h: most.append(len(h)) or TransformersEngine.logits(variant, h))
    again = score(variant, TEXT, reference)
    assert max(most) == 3
    assert variant.passes == before + 1
    assert dict(_flat(again.measured())) == pytest.approx(dict(_flat(whole.measured())), rel=1e-5)


def _flat(measured: list) -> list[tuple[str, float]]:
    return [(f"{metric} {detail}", value) for metric, value, detail in measured]


def test_reference_states_come_back_from_disk(engine: TransformersEngine, tmp_path: Path) -> None:
    reference = reference_states(engine, TEXT, engine.head, 299)
    reference.save(tmp_path / "reference.safetensors")
    again = ReferenceStates.load(tmp_path / "reference.safetensors")
    assert torch.equal(again.hidden, reference.hidden)
    assert torch.equal(again.head, reference.head)
    assert (again.vocab_size, again.windows_hash) == (299, reference.windows_hash)
    with pytest.raises(QbenchError, match="other windows"):
        score(engine, windows(some_tokens(150), seq_len=40, stride=24, bos=1), again)


def test_a_reference_whose_logits_are_more_than_its_head_is_refused(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "logits", lambda h: 2 * torch.tanh(TransformersEngine.logits(engine, h) / 2))
    with pytest.raises(QbenchError, match="bias, a cap or a scale"):
        reference_states(engine, TEXT, engine.head, 300)


def test_a_head_too_large_for_its_logits_is_refused(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "logits", lambda h: 1e38 * 1e3 * TransformersEngine.logits(engine, h))
    with pytest.raises(QbenchError, match="the weight of its head is broken"):
        reference_states(engine, TEXT, engine.head, 300)


def test_standard_error_and_buckets_in_closed_form() -> None:
    found = summarize_nll([torch.tensor([1.0, 3.0]).double(), torch.tensor([2.0]).double()])
    assert (found.nll, found.window_nlls, found.num_tokens) == (2.0, [2.0, 2.0], 3)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    kl, agrees = torch.tensor([0.0, 1.0, 3.0]).double(), torch.tensor([True, False, True])
    split = summarize_divergence(kl, agrees, torch.tensor([0.2, 0.8, 1.0]).double())
    assert [(b.low, b.high, b.num_positions, b.kl_mean) for b in split.buckets] == [
        (0.0, 0.25, 1, 0.0),
        (0.75, 0.9, 1, 1.0),
        (0.9, 1.0, 1, 3.0),
    ]


def test_a_perplexity_beyond_any_float_is_refused() -> None:
    found = summarize_nll([torch.tensor([1000.0]).double()])
    with pytest.raises(QbenchError, match="1000 nats a token make no finite perplexity"):
        found.measured()
