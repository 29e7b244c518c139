"""A generating request on its way from tokens to text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbench.runtime.detokenizer import Decoder, Detokenizer, StopTexts
from qbench.runtime.outputs import Completion, FinishReason, RequestOutput, StepOutput
from qbench.runtime.request import Request, SamplingParams


class Generation:
    """A generating request and the text it has given so far."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        max_tokens: int,
        tokenizer: Decoder,
        generator: torch.Generator | None,
    ) -> None:
        self.request = request
        self.params = params
        self.num_prompt_tokens = request.num_tokens
        self.max_tokens = max_tokens
        self.generator = generator
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopTexts(params.stop)

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.num_prompt_tokens :]

    def advance(self, eos_token_ids: Sequence[int]) -> StepOutput:
        """Takes note of the token that was just sampled."""
        token = self.request.token_ids[-1]
        before = len(self.text)
        if token in eos_token_ids and not self.params.ignore_eos:
            self._finish("stop")
        elif token in self.params.stop_token_ids:
            self._finish("stop", token)
        else:
            self._show(self._detokenizer.push(token))
            if self.finish_reason is None and self.request.num_tokens == self.num_prompt_tokens + self.max_tokens:
                self._finish("length")
        finished = self.finish_reason is not None
        return StepOutput(self.request.request_id, [token], self.text[before:], finished, self.finish_reason)

    def output(self) -> RequestOutput:
        """The finished request's result."""
        assert self.finish_reason is not None, f"request {self.request.request_id!r} is not finished"
        completion = Completion(self.text, self.token_ids, self.finish_reason, self.stop_reason)
        prompt = self.request.token_ids[: self.num_prompt_tokens]
        return RequestOutput(self.request.request_id, prompt, [completion])

    def _show(self, piece: str) -> None:
        self.text += self._stops.push(piece)
        if self._stops.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.found

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self._show(self._detokenizer.flush())
        if self.finish_reason is None:  # the flushed characters completed no stop text
            self.text += self._stops.flush()
            self.finish_reason, self.stop_reason = reason, stop_reason
