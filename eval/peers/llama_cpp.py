"""llama.cpp's server in this process (package xllamacpp), set to be as exact as it can be."""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

CACHE_TYPES = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "f16": xllamacpp.ggml_type.GGML_TYPE_F16}


class LlamaCpp:
    """A GGUF file on one thread: key-value cache in `cache` (llama.cpp's default is f16), flash attention off."""

    def __init__(self, path: Path, *, context: int = 1024, cache: str = "f32", flash: bool = False) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # two that spin suffer from any other load
        params.warmup = params.fit_params = False
        params.cache_ram_mib = params.n_ctx_checkpoints = 0
        params.verbosity = -1
        params.cache_type_k = params.cache_type_v = CACHE_TYPES[cache]
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def _complete(self, prompt: list[int], **settings: Any) -> Any:
        body = {"prompt": prompt, "temperature": 0, "top_k": 1, "return_tokens": True, "cache_prompt": True, **settings}
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The likeliest `count` ids after `prompt`; fewer when the text ends (the end token is left out)."""
        ids: list[int] = self._complete(prompt, n_predict=count)["tokens"]
        return ids

    def first_tokens(self, row: list[int]) -> list[int]:
        """The likeliest next id after each beginning of `row`, its last token apart."""
        found = []
        for stop in range(1, len(row)):
            answer = self._complete(row[:stop], n_predict=1, n_probs=1, top_k=0)
            found.append(int(answer["completion_probabilities"][0]["id"]))
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", choices=[*CACHE_TYPES], default="f32", help="llama.cpp's key-value cache")
    parser.add_argument("--flash", action="store_true", help="llama.cpp's flash attention")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_options` added, for `LlamaCpp`."""
    return {"cache": arguments.cache, "flash": arguments.flash}
