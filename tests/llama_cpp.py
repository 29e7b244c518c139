"""llama.cpp as a judge: tokenizes and completes with a GGUF file, through its own server in this process."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCpp:
    """A model loaded by llama.cpp on one thread with a context of 512 tokens."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 512
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # two that spin suffer from any other load
        params.warmup = params.fit_params = False
        params.cache_ram_mib = 0
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokenize(self, text: str) -> list[int]:
        """Ids with BOS and EOS as the file says, special tokens recognised."""
        ids: list[int] = self._post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return ids

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely `count` ids after `prompt`, fewer when the text ends."""
        answer = self._post("/completion", prompt=prompt, n_predict=count, temperature=0, top_k=1, return_tokens=True)
        ids: list[int] = answer["tokens"]
        return ids

    def next_log_probabilities(self, prompt: list[int], count: int) -> dict[int, float]:
        """Log-probabilities (nats) of the `count` most likely next ids."""
        answer = self._post("/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=count, top_k=0)
        return {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
