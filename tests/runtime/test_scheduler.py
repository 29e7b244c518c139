from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbench.errors import QbenchError
from qbench.runtime.request import Request
from qbench.runtime.scheduler import ScheduledStep, Scheduler, SchedulerSettings


def scheduler(**fields: int) -> Scheduler:
    return Scheduler(SchedulerSettings(**({"num_blocks": 16, "block_size": 4, "max_model_len": 64} | fields)))  # type: ignore[arg-type]


def compute(scheduler: Scheduler) -> ScheduledStep:
    """One step; every request that samples gets token 7."""
    step = scheduler.schedule()
    scheduler.update(step, {part.request_id: 7 for part in step.requests if part.samples})
    scheduler.check_integrity()
    return step


def shares(step: ScheduledStep) -> list[tuple[str, int, int, bool]]:
    return [(p.request_id, p.start, len(p.token_ids), p.samples) for p in step.requests]


def test_the_budget_is_shared_in_order_and_long_prompts_come_in_chunks() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add(Request("a", list(range(5))))
    s.add(Request("b", list(range(10, 20))))
    assert shares(compute(s)) == [("a", 0, 5, True), ("b", 0, 3, False)]
    assert shares(compute(s)) == [("a", 5, 1, True), ("b", 3, 7, True)]
    assert shares(compute(s)) == [("a", 6, 1, True), ("b", 10, 1, True)]


def test_no_more_than_max_num_seqs_run() -> None:
    s = scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(Request(name, [1, 2, 3]))
    assert [p.request_id for p in compute(s).requests] == ["a", "b"]
    s.remove("a")
    assert [p.request_id for p in compute(s).requests] == ["b", "c"]


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    s = scheduler(num_blocks=3)
    for name, prompt in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8]), ("c", [9, 9, 9])):
        s.add(Request(name, prompt))
    compute(s)
    assert [r.request_id for r in s.running] == ["a", "b", "c"]
    step = compute(s)  # a and b need a block each: c gives its own, then b too
    assert [p.request_id for p in step.requests] == ["a"]
    assert [r.request_id for r in s.waiting] == ["b", "c"]
    s.remove("a")
    step = compute(s)
    assert shares(step)[0][0] == "b"
    assert step.requests[0].token_ids == [5, 6, 7, 8, 7][step.requests[0].start :]
    assert s.num_preemptions == 2


def test_block_tables_only_grow() -> None:
    s = scheduler()
    s.add(Request("a", [1, 2, 3]))
    table: list[int] = []
    for _ in range(12):
        part = compute(s).requests[0]
        assert part.block_table[: len(table)] == table
        assert len(part.block_table) == -(-(part.start + len(part.token_ids)) // 4)
        table = part.block_table


def test_a_second_request_starts_behind_the_shared_prefix() -> None:
    s = scheduler()
    s.add(Request("a", list(range(10))))
    compute(s)
    s.remove("a")
    s.add(Request("b", [*range(8), 50, 51]))
    assert shares(compute(s)) == [("b", 8, 2, True)]
    assert s.num_reused_tokens == 8


def test_requests_that_are_scored_compute_every_position() -> None:
    s = scheduler()
    for name in ("a", "b"):
        s.add(Request(name, list(range(9)), samples=False))
        assert shares(compute(s)) == [(name, 0, 9, False)]
        s.remove(name)
    assert s.pool.num_cached == 0


@pytest.mark.parametrize(
    "field", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
def test_settings_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(QbenchError, match=f"{field} is 0; it must be at least 1"):
        scheduler(**{field: 0})


operations = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 16), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("remove"), st.integers(0, 10)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=60), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_used_free_and_cached_are_the_whole_pool_after_every_operation(
    ops: list[tuple[object, ...]], block_size: int, budget: int, seqs: int, caching: bool
) -> None:
    s = scheduler(
        num_blocks=-(-20 // block_size),
        block_size=block_size,
        max_model_len=20,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
    )
    for number, (kind, *args) in enumerate(ops):
        if kind == "add":
            length, family, samples = args
            s.add(Request(str(number), [family] * int(length), samples=bool(samples)))  # type: ignore[call-overload, list-item]
        elif kind == "step":
            for _ in range(int(args[0])):  # type: ignore[call-overload]
                step = compute(s)
                assert bool(step.requests) == bool(s.requests), "work is left but nothing is scheduled"
                assert sum(len(part.token_ids) for part in step.requests) <= budget
                for request in list(s.requests.values()):
                    scored = not request.samples and request.num_computed_tokens == request.num_tokens
                    if scored or request.num_tokens == s.settings.context:
                        s.remove(request.request_id)
        elif s.requests:
            s.remove(list(s.requests)[int(args[0]) % len(s.requests)])  # type: ignore[call-overload]
        s.check_integrity()
        pool = s.pool
        assert pool.num_used + pool.num_free + pool.num_cached == pool.num_blocks
    for request_id in list(s.requests):
        s.remove(request_id)
    s.check_integrity()
    assert s.pool.num_available == s.pool.num_blocks
