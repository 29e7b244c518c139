from __future__ import annotations

import pytest
import torch

from qbench.errors import QbenchError
from qbench.runtime.engine import Engine
from qbench.runtime.outputs import StepOutput
from qbench.runtime.request import SamplingParams
from tests.runtime.fake import VOCAB, FakeRunner, expected, fake_engine, hidden_of

PROMPTS = [[(7 * i + j) % 250 for j in range(1 + 3 * i)] for i in range(12)]


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)  # type: ignore[arg-type]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    generations = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished():
        engine.step()
        engine.scheduler.check_integrity()
    return [generation.token_ids for generation in generations]


@pytest.mark.trap(51)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [14, 128])
@pytest.mark.parametrize("budget", [3, 50])
def test_outputs_do_not_depend_on_batching_chunks_cache_or_preemption(
    caching: bool, num_blocks: int, budget: int
) -> None:
    engine = fake_engine(num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for _ in range(2):  # the second time the prefixes are known
        assert run(engine, PROMPTS, greedy(max_tokens=15)) == [expected(prompt, 15) for prompt in PROMPTS]
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 14)
    if num_blocks == 128:
        assert (engine.scheduler.num_reused_tokens > 0) == caching


@pytest.mark.trap(49)
def test_a_prompt_of_whole_blocks_gives_the_same_output_twice() -> None:
    engine = fake_engine()
    prompt = list(range(12))
    for reused in (0, 8):
        assert run(engine, [prompt], greedy(max_tokens=5)) == [expected(prompt, 5)]
        assert engine.scheduler.num_reused_tokens == reused


@pytest.mark.trap(56)
@pytest.mark.parametrize("caching", [True, False])
def test_a_thousand_aborts_give_every_block_back(caching: bool) -> None:
    engine = fake_engine(num_blocks=16, enable_prefix_caching=caching, max_num_batched_tokens=16)
    for i in range(1000):
        engine.add_request(str(i), [i % 200, 1, 2, 3, 4, 5], greedy(max_tokens=50))
        engine.step()
        if i % 3:
            engine.step()
        engine.abort(str(i - i % 2))
        engine.abort(str(i))
        engine.abort(str(i))
    pool = engine.scheduler.pool
    assert not engine.has_unfinished()
    assert pool.num_available == 16
    assert caching or pool.num_free == 16
    engine.scheduler.check_integrity()


@pytest.mark.trap(57)
def test_prompts_that_cannot_run_are_refused_and_the_others_go_on() -> None:
    engine = fake_engine(num_blocks=4)
    good = engine.add_request("good", [1, 2, 3], greedy(max_tokens=4))
    for prompt, message in (
        ([], "has no tokens"),
        ([1] * 16, "16 tokens; at most 15 are allowed .*cache of 4 blocks of 4 tokens"),
        ([1, VOCAB], "outside the vocabulary; 0 to 299"),
        ([-1], "outside the vocabulary"),
    ):
        with pytest.raises(QbenchError, match=message):
            engine.add_request("bad", prompt, greedy())
    while engine.has_unfinished():
        engine.step()
    assert good.token_ids == expected([1, 2, 3], 4)


@pytest.mark.trap(57)
def test_max_tokens_beyond_the_context_is_lowered_and_ends_with_length() -> None:
    engine = fake_engine(num_blocks=4)
    generation = engine.add_request("a", [1] * 15, greedy(max_tokens=10**9))
    other = engine.add_request("b", [1] * 3, greedy(max_tokens=10**9))
    while engine.has_unfinished():
        engine.step()
    assert generation.token_ids == expected([1] * 15, 1)
    assert (len(other.token_ids), other.finish_reason) == (13, "length")


@pytest.mark.trap(34)
def test_every_end_token_stops_unless_ignored() -> None:
    prompt = [5, 6, 7]
    tokens = expected(prompt, 8)
    for position in (2, 5):
        engine = fake_engine(eos_token_ids=(299, tokens[position]))
        generation = engine.add_request("a", prompt, greedy(max_tokens=8))
        while engine.has_unfinished():
            last = engine.step()
        assert generation.token_ids == tokens[: position + 1]
        assert (generation.finish_reason, generation.stop_reason) == ("stop", None)
        assert last == [StepOutput("a", [tokens[position]], last[0].text, True, "stop")]
        assert run(engine, [prompt], greedy(max_tokens=8, ignore_eos=True)) == [tokens]


def test_a_stop_token_ends_the_output_and_names_itself() -> None:
    prompt = [5, 6, 7]
    tokens = expected(prompt, 8)
    engine = fake_engine()
    generation = engine.add_request("a", prompt, greedy(max_tokens=8, stop_token_ids=[tokens[3]]))
    while engine.has_unfinished():
        engine.step()
    assert generation.token_ids == tokens[:4]
    assert (generation.finish_reason, generation.stop_reason) == ("stop", tokens[3])
    assert generation.text == engine.tokenizer.decode(
        tokens[:3], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.trap(55)
def test_a_stop_text_ends_the_output_and_was_never_streamed() -> None:
    engine = fake_engine()
    prompt = [3, 1, 4]
    whole = engine.add_request("whole", prompt, greedy(max_tokens=40))
    while engine.has_unfinished():
        engine.step()
    stop = whole.text[10:14]
    generation = engine.add_request("cut", prompt, greedy(max_tokens=40, stop=[stop]))
    streamed = ""
    while engine.has_unfinished():
        streamed += "".join(output.text for output in engine.step())
        assert stop not in streamed
    assert streamed == generation.text == whole.text[: whole.text.index(stop)]
    assert (generation.finish_reason, generation.stop_reason) == ("stop", stop)
    assert len(generation.token_ids) < 40


def test_the_beginning_of_a_stop_text_is_shown_when_the_output_ends_with_it() -> None:
    engine = fake_engine()
    whole = engine.add_request("whole", [3, 1, 4], greedy(max_tokens=40))
    while engine.has_unfinished():
        engine.step()
    held = engine.add_request("held", [3, 1, 4], greedy(max_tokens=40, stop=[whole.text[-2:] + "never"]))
    while engine.has_unfinished():
        last = engine.step()
    assert (held.text, held.finish_reason) == (whole.text, "length")
    assert last[0].text.endswith(whole.text[-2:])


@pytest.mark.trap(52)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12, seed=11)
    alone = [run(fake_engine(), [prompt], params)[0] for prompt in PROMPTS]
    assert run(fake_engine(seed=5, num_blocks=20), PROMPTS, params) == alone
    assert run(fake_engine(), PROMPTS, SamplingParams(temperature=2.0, max_tokens=12, seed=12)) != alone
    assert alone[5] != expected(PROMPTS[5], 12)


def test_the_engine_seed_makes_requests_without_a_seed_repeatable() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12)
    first = run(fake_engine(seed=1), PROMPTS, params)
    assert first == run(fake_engine(seed=1), PROMPTS, params)
    assert first != run(fake_engine(seed=2), PROMPTS, params)


def states(row: list[int]) -> list[int]:
    return [hidden_of(row[:stop]) for stop in range(1, len(row) + 1)]


@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 50), (64, 7), (9, 50)])
def test_scored_rows_come_in_order_with_every_position(num_blocks: int, budget: int) -> None:
    engine = fake_engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
    rows = [*PROMPTS[:11], PROMPTS[9], PROMPTS[9]]
    found = [hidden[:, 0].long().tolist() for hidden in engine.encode(rows)]
    assert found == [states(row) for row in rows]
    assert engine.scheduler.num_reused_tokens == 0
    assert engine.scheduler.pool.num_free == num_blocks


def test_a_scored_row_that_is_preempted_half_way_is_whole_in_the_end() -> None:
    engine = fake_engine(num_blocks=12, max_num_batched_tokens=5)
    generation = engine.add_request("a", [1, 2], greedy(max_tokens=40))
    engine.step()
    rows = [[i] * 29 for i in range(4)]
    found = [hidden[:, 0].long().tolist() for hidden in engine.encode(rows)]
    assert found == [states(row) for row in rows]
    assert engine.scheduler.num_preemptions > 0
    assert generation.token_ids == expected([1, 2], 40)


def test_scoring_holds_about_one_step_of_rows_and_can_be_left_early() -> None:
    engine = fake_engine(max_num_batched_tokens=20)
    rows = engine.encode([[i] * 10 for i in range(50)])
    next(rows)
    assert isinstance(engine.runner, FakeRunner)
    assert engine.runner.num_computed <= 40
    rows.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished()
    assert engine.scheduler.pool.num_free == 64


@pytest.mark.trap(57)
def test_a_bad_row_is_refused_before_any_is_computed() -> None:
    engine = fake_engine()
    with pytest.raises(QbenchError, match="Row 1 has no tokens"):
        engine.encode([[1, 2], []])
    assert not engine.has_unfinished()


def test_logits_of_scored_rows() -> None:
    engine = fake_engine()
    (hidden,) = engine.encode([[1, 2, 3]])
    assert torch.argmax(engine.logits(hidden), 1).tolist() == [value % VOCAB for value in states([1, 2, 3])]
