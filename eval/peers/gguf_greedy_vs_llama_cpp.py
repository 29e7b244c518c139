"""Greedy text of F16 GGUF files in llama.cpp, against the built-in runtime in float32 with the same weights.

    python eval/peers/gguf_greedy_vs_llama_cpp.py RUN [NAME...] [--tokens 24]

RUN is the folder `qbench run` made; NAME is ``reference`` or a variant (default: the reference and every variant that
was exported to GGUF). Each model is written as F16 to a temporary file and answers twenty prompts. llama.cpp rounds
activations to float16 there, so tokens are equal up to the first near tie (top-2 margin under 0.05). It keeps keys and
values in float32 here and runs without flash attention (``--cache f16 --flash`` for its own defaults). Prints a JSON
line a model; exit code 1 when text differs at more than a near tie.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from dense import float32_model, margin
from llama_cpp import LlamaCpp, add_options, options_of
from prompts import prompt_ids
from runs import exported_files, recipe_of, source_of

import qbench
from qbench.export.gguf import write
from qbench.models.source import ModelSource

NEAR_TIE = 0.05


def without_end(llm: qbench.LLM, answer: list[int]) -> list[int]:
    """An answer without the token that ended it."""
    return answer[:-1] if answer and answer[-1] in llm.engine.eos_token_ids else answer


def greedy(name: str, source: ModelSource, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """F16 file: where the text of each prompt first differs, and the top-2 margin there."""
    llm = qbench.LLM(source, dtype="float32", device="cpu", max_model_len=1024, max_num_seqs=20)
    prompts = prompt_ids(llm)
    params = qbench.SamplingParams(temperature=0, max_tokens=count)
    ours = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    judge, compared, differ = float32_model(source), 0, []
    with tempfile.TemporaryDirectory() as folder:
        write(source, Path(folder), type="f16")
        llama = LlamaCpp(Path(folder) / "model.gguf", **options)
        for number, (prompt, own) in enumerate(zip(prompts, ours, strict=True)):
            own, theirs = (without_end(llm, answer) for answer in (own, llama.greedy(prompt, count)))
            place = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), None)
            if place is None and len(own) != len(theirs):
                place = min(len(own), len(theirs))
            compared += len(own) if place is None else place + 1
            if place is not None:
                differ.append((number, place, round(margin(judge, prompt + own[:place]), 4)))
    return {
        "greedy": name,
        "ok": all(tie < NEAR_TIE for _, _, tie in differ),
        "equal_prompts": len(prompts) - len(differ),
        "prompts": len(prompts),
        "tokens_compared": compared,
        "first_differences (prompt, token, margin)": differ,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tokens", type=int, default=24)
    add_options(parser)
    arguments = parser.parse_args()
    recipe, holds = recipe_of(arguments.run), True
    for name in arguments.names or ["reference", *exported_files(arguments.run)]:
        found = greedy(name, source_of(arguments.run, recipe, name), arguments.tokens, options_of(arguments))
        print(json.dumps(found), flush=True)
        holds &= found["ok"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
