"""Closed-loop load: a fixed number of requests in flight; each one that ends is replaced until all are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from qbench.errors import QbenchError
from qbench.runtime.request import SamplingParams


class StepOutput(Protocol):
    """What one engine step did for one request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finished(self) -> bool: ...


class LoadedEngine(Protocol):
    """What a benchmark needs of the runtime."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> object: ...

    def step(self) -> Sequence[StepOutput]: ...

    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True)
class Workload:
    """`num_requests` prompts of `prompt_tokens`, each answered with exactly `output_tokens` greedy tokens."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    def prompts(self, tokens: list[int], concurrency: int) -> list[list[int]]:
        """One more prompt than `num_requests` (the warm-up comes first), all different: random slices of a held-out
        token stream, seeded by `seed` and `concurrency`, so that a prefix cache cannot answer one from another.

        Raises `QbenchError` when the stream is too short to give that many different slices.
        """
        starts = len(tokens) - self.prompt_tokens + 1
        if starts <= self.num_requests:
            raise QbenchError(
                f"benchmark: a text of {len(tokens)} tokens cannot give {self.num_requests + 1} different prompts "
                f"of {self.prompt_tokens}; at least {self.prompt_tokens + self.num_requests} tokens are needed."
            )
        chosen = np.random.default_rng([self.seed, concurrency]).choice(starts, self.num_requests + 1, replace=False)
        return [tokens[start : start + self.prompt_tokens] for start in chosen.tolist()]

    def provenance(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RequestTimes:
    """Clock readings in seconds: submission, and the arrival of every output token."""

    submitted: float
    token_times: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.token_times)]

    @property
    def time_per_output_token(self) -> float | None:
        """(last - first) / (n - 1); undefined (None) for a single token."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps else None


def run_closed_loop(
    engine: LoadedEngine,
    workload: Workload,
    tokens: list[int],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestTimes]:
    """Serves `workload` with `concurrency` requests in flight, after one warm-up request that is not counted.

    Tokens are those the engine reports, timed when the step that made them returns; several from one step arrive
    together. Raises `QbenchError` when a request ends before its `output_tokens`.
    """
    warm_up, *prompts = workload.prompts(tokens, concurrency)
    _serve(engine, workload, [warm_up], 1, clock, "warmup")
    return _serve(engine, workload, prompts, concurrency, clock, f"load-{concurrency}")


def _serve(
    engine: LoadedEngine,
    workload: Workload,
    prompts: list[list[int]],
    concurrency: int,
    clock: Callable[[], float],
    name: str,
) -> list[RequestTimes]:
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
    times: dict[str, RequestTimes] = {}
    waiting = {f"{name}-{i}": prompt for i, prompt in enumerate(prompts)}

    def submit() -> None:
        request_id = next(iter(waiting))
        times[request_id] = RequestTimes(clock())
        engine.add_request(request_id, waiting.pop(request_id), params)

    for _ in range(min(concurrency, len(prompts))):
        submit()
    while engine.has_unfinished():
        outputs = engine.step()
        now = clock()
        for output in outputs:
            request = times[output.request_id]
            request.token_times += [now] * len(output.token_ids)
            if not output.finished:
                continue
            if len(request.token_times) != workload.output_tokens:
                raise QbenchError(
                    f"benchmark: a request of {workload.prompt_tokens} prompt tokens ended after "
                    f"{len(request.token_times)} of {workload.output_tokens} output tokens; "
                    "both together must fit the model's context."
                )
            if waiting:
                submit()
    return list(times.values())
