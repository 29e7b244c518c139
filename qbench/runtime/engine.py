"""Continuous batching: requests are queued, scheduled step by step, computed, sampled, finished."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from qbench.errors import QbenchError
from qbench.runtime.detokenizer import Decoder
from qbench.runtime.generation import Generation
from qbench.runtime.outputs import StepOutput
from qbench.runtime.request import Request, SamplingParams
from qbench.runtime.sampler import sample
from qbench.runtime.scheduler import ScheduledStep, Scheduler, SchedulerSettings


class Runner(Protocol):
    """The model side: `qbench.runtime.runner.ModelRunner`."""

    def execute(self, step: ScheduledStep) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(eq=False)
class _Scoring:
    """A row whose hidden states are wanted."""

    request: Request
    chunks: list[torch.Tensor] = field(default_factory=list)
    done: bool = False

    def add(self, start: int, hidden: torch.Tensor) -> None:
        if start == 0:  # the first chunk, or the first one again after a preemption
            self.chunks = []
        self.chunks.append(hidden)
        self.done = start + len(hidden) == self.request.num_tokens


class Engine:
    """Continuous batching over one model.

    `seed` makes the runs of requests without a seed of their own repeatable, as long as they are added in the same
    order.
    """

    def __init__(
        self,
        runner: Runner,
        settings: SchedulerSettings,
        *,
        tokenizer: Decoder,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.settings = settings
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.scheduler = Scheduler(settings)
        self._device = device
        self._seeds = random.Random(seed)
        self._generations: dict[str, Generation] = {}
        self._scorings: dict[str, _Scoring] = {}
        self._num_rows = 0

    def check_prompt(self, token_ids: Sequence[int], where: str) -> None:
        """Raises `QbenchError` when a prompt cannot be generated from; `where` names it in the message."""
        self._check_row(token_ids, where, self.settings.context - 1, "one more is needed for the output")

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Queues a prompt. `max_tokens` beyond what the context leaves is lowered to it.

        Raises `QbenchError` when the prompt is empty, too long, or has ids outside the vocabulary.
        """
        self.check_prompt(prompt_token_ids, f"Prompt of request {request_id!r}")
        request = Request(request_id, list(prompt_token_ids))
        self.scheduler.add(request)
        max_tokens = min(params.max_tokens, self.settings.context - request.num_tokens)
        generation = Generation(request, params, max_tokens, self.tokenizer, self._generator(params))
        self._generations[request_id] = generation
        return generation

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests)

    def abort(self, request_id: str) -> None:
        """Ends a request and gives its blocks back; nothing happens when it has ended already."""
        generation = self._generations.get(request_id)
        if generation is not None:
            generation.finish_reason = "abort"
            self._drop(self._generations, generation.request)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Computes one step; what it added to each request that got a token."""
        step = self.scheduler.schedule()
        if not step.requests:
            return []
        hidden = self.runner.execute(step)
        sampling: list[Generation] = []
        last: list[int] = []  # where their last positions are in `hidden`
        scored: list[_Scoring] = []
        stop = 0
        for part in step.requests:
            start, stop = stop, stop + len(part.token_ids)
            if part.samples:
                sampling.append(self._generations[part.request_id])
                last.append(stop - 1)
            elif part.request_id in self._scorings:
                scored.append(self._scorings[part.request_id])
                scored[-1].add(part.start, hidden[start:stop])
        tokens = self._sample(hidden[last], sampling) if sampling else []
        self.scheduler.update(step, {g.request.request_id: t for g, t in zip(sampling, tokens, strict=True)})
        for scoring in scored:
            if scoring.done:
                self._drop(self._scorings, scoring.request)
        outputs = [generation.advance(self.eos_token_ids) for generation in sampling]
        for generation in sampling:
            if generation.finish_reason is not None:
                self._drop(self._generations, generation.request)
        return outputs

    def encode(self, rows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Each row's final-normed hidden states ``[len(row), hidden]``, in the order of `rows`.

        Rows go through the same scheduler, cache and kernels as generation, but every position is computed: nothing
        comes from the prefix cache. Rows are started as they are taken: at most one step's tokens and one row more
        are held. Raises `QbenchError` before anything is computed when a row is empty, too long, or has ids outside
        the vocabulary.
        """
        for index, row in enumerate(rows):
            self._check_row(row, f"Row {index}", self.settings.context, "")
        return self._encode(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        with torch.no_grad():
            return self.runner.logits(hidden)

    def _encode(self, rows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        ahead: deque[_Scoring] = deque()
        upcoming = iter(rows)
        exhausted = False
        try:
            while not exhausted or ahead:
                while not exhausted and sum(s.request.num_tokens for s in ahead) < self.settings.max_num_batched_tokens:
                    row = next(upcoming, None)
                    if row is None:
                        exhausted = True
                    else:
                        ahead.append(self._add_row(row))
                while ahead and not ahead[0].done:
                    self.step()
                if ahead:
                    yield torch.cat(ahead.popleft().chunks)
        finally:
            for scoring in ahead:
                if not scoring.done:
                    self._drop(self._scorings, scoring.request)

    def _add_row(self, row: Sequence[int]) -> _Scoring:
        scoring = _Scoring(Request(f"row-{self._num_rows}", list(row), samples=False))
        self._num_rows += 1
        self.scheduler.add(scoring.request)
        self._scorings[scoring.request.request_id] = scoring
        return scoring

    def _drop(self, live: dict[str, Generation] | dict[str, _Scoring], request: Request) -> None:
        del live[request.request_id]
        self.scheduler.remove(request.request_id)

    def _generator(self, params: SamplingParams) -> torch.Generator | None:
        if params.temperature == 0:
            return None
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return torch.Generator(self._device).manual_seed(seed)

    def _sample(self, hidden: torch.Tensor, generations: list[Generation]) -> list[int]:
        return sample(
            self.runner.logits(hidden),
            [g.params for g in generations],
            [g.request.token_ids for g in generations],
            [g.generator for g in generations],
        )

    def _check_row(self, token_ids: Sequence[int], where: str, limit: int, why: str) -> None:
        if not token_ids:
            raise QbenchError(f"{where} has no tokens; at least one is needed.")
        if len(token_ids) > limit:
            because = f"; {why}" if why else ""
            raise QbenchError(
                f"{where} has {len(token_ids)} tokens; at most {limit} are allowed (max_model_len "
                f"{self.settings.max_model_len}, cache of {self.settings.num_blocks} blocks of "
                f"{self.settings.block_size} tokens{because})."
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise QbenchError(f"{where} has token ids outside the vocabulary; 0 to {self.vocab_size - 1} are allowed.")
