"""What to compute next.

There is no prefill phase and no decode phase. Each step hands out a budget of tokens so that the computed tokens of
every running request catch up with its known tokens (prompt and what was sampled). A long prompt thus comes in
chunks, a prefix-cache hit is a request that starts ahead, and a preempted one starts again from nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

from qbench.errors import QbenchError
from qbench.runtime.block_pool import BlockPool
from qbench.runtime.prefix_cache import PrefixCache
from qbench.runtime.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step."""

    request_id: str
    token_ids: list[int]  # the ids to compute in this step
    start: int  # position of token_ids[0]: the tokens computed before this step
    block_table: list[int]  # physical block ids, enough for start + len(token_ids) tokens
    samples: bool  # this chunk reaches the end of the known tokens: its last position's logits are sampled


@dataclass(frozen=True)
class ScheduledStep:
    """What one forward pass computes."""

    requests: list[ScheduledRequest]


@dataclass(frozen=True)
class SchedulerSettings:
    """Limits of the scheduler, all at least 1. Raises `QbenchError` on a smaller one."""

    num_blocks: int
    block_size: int = 16  # tokens a block
    max_num_seqs: int = 64  # requests that run at once
    max_num_batched_tokens: int = 2048  # tokens computed in one step
    max_model_len: int = 2048  # prompt and output tokens of one request
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1 and field.name != "enable_prefix_caching":
                raise QbenchError(f"Runtime setting {field.name} is {value}; it must be at least 1.")

    @property
    def context(self) -> int:
        """Prompt and output tokens one request may have: the model's limit or all the cache holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Scheduler:
    """First come, first served; when blocks run out, the request admitted last gives its own back."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.cache = PrefixCache(settings.block_size)
        self.pool = BlockPool(settings.num_blocks, evicted=self.cache.forget)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.num_preemptions = 0
        self.num_reused_tokens = 0  # taken from the prefix cache

    def add(self, request: Request) -> None:
        """Queues a request of 1 to `settings.context` tokens."""
        assert request.request_id not in self.requests, f"request {request.request_id!r} is there already"
        assert 0 < request.num_tokens <= self.settings.context
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def remove(self, request_id: str) -> None:
        """Takes a finished or aborted request out and gives its blocks back."""
        request = self.requests.pop(request_id)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> ScheduledStep:
        """The next step; empty when nothing is left to compute. `update` must follow before the next call."""
        budget = self.settings.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted = self._grow_running()
        for request in self.running:
            budget = self._take(request, budget, scheduled)
        while self.waiting and not preempted and budget and len(self.running) < self.settings.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            budget = self._take(request, budget, scheduled)
        return ScheduledStep(scheduled)

    def update(self, step: ScheduledStep, sampled: Mapping[str, int]) -> None:
        """`step` was computed; `sampled` has the next token of each of its requests that samples."""
        for part in step.requests:
            request = self.requests[part.request_id]
            request.num_computed_tokens += len(part.token_ids)
            if self._caches(request):
                self._key_full_blocks(request)
            if part.samples:
                request.token_ids.append(sampled[part.request_id])

    def check_integrity(self) -> None:
        """Asserts that blocks, tables and requests agree."""
        self.pool.check_integrity(request.block_table for request in self.requests.values())
        for request in self.running:
            assert self._blocks_for(request.num_computed_tokens) <= len(request.block_table)
        assert all(not request.block_table for request in self.waiting)
        assert {id(r) for r in self.requests.values()} == {id(r) for r in [*self.waiting, *self.running]}

    def _take(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        """Schedules as much of `request` as `budget` allows; returns what is left of it."""
        start = request.num_computed_tokens
        stop = min(request.num_tokens, start + budget)
        if start < stop:
            samples = request.samples and stop == request.num_tokens
            table = request.block_table[: self._blocks_for(stop)]
            ids = request.token_ids[start:stop]
            scheduled.append(ScheduledRequest(request.request_id, ids, start, table, samples))
        return budget - (stop - start)

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request the blocks of all its known tokens, cached ones where the prefix is known."""
        hits, prefix = self.cache.match(request.token_ids) if self._caches(request) else ([], 0)
        missing = self._blocks_for(request.num_tokens) - len(hits)
        if missing > self.pool.num_available - sum(map(self.pool.is_cached, hits)):
            return False
        for block in hits:
            self.pool.share(block)
        request.block_table = hits + [self.pool.allocate() for _ in range(missing)]
        request.num_keyed_blocks, request.prefix = len(hits), prefix
        request.num_computed_tokens = len(hits) * self.settings.block_size
        self.num_reused_tokens += request.num_computed_tokens
        return True

    def _grow_running(self) -> bool:
        """Gives running requests blocks for their new tokens, oldest first; True when one was preempted for it."""
        preempted = False
        for request in list(self.running):
            while request in self.running and self._blocks_for(request.num_tokens) > len(request.block_table):
                if self.pool.num_available:
                    request.block_table.append(self.pool.allocate())
                else:
                    self._preempt(self.running.pop())
                    preempted = True
        return preempted

    def _preempt(self, request: Request) -> None:
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        for block in reversed(request.block_table):  # a prefix outlives what follows it
            self.pool.release(block, keep=block in self.cache)
        request.reset()

    def _key_full_blocks(self, request: Request) -> None:
        size = self.settings.block_size
        for index in range(request.num_keyed_blocks, request.num_computed_tokens // size):
            ids = request.token_ids[index * size : (index + 1) * size]
            request.prefix = self.cache.insert(request.prefix, ids, request.block_table[index])
            request.num_keyed_blocks += 1

    def _caches(self, request: Request) -> bool:
        return self.settings.enable_prefix_caching and request.samples

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.block_size)
