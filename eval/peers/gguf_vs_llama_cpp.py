"""Exported GGUF files in llama.cpp, against the built-in runtime in float32 with the same weights.

    python eval/peers/gguf_vs_llama_cpp.py RUN [--greedy NAME...] [--teacher NAME...] [--positions 2044]

RUN is the folder `qbench run` made; NAME is ``reference`` or a variant. Variants default to those exported to GGUF.

- ``--greedy``: writes an F16 GGUF file of the model and compares greedy text over twenty prompts. llama.cpp rounds
  activations to float16 there, so tokens are equal up to the first near tie (top-2 margin under 0.05).
- ``--teacher``: the exported file's weights, dequantized by gguf-py, against the variant's own, exactly; then the
  likeliest next token at every position of the run's held-out windows, llama.cpp's against ours. llama.cpp rounds the
  activations that meet Q4_0 and Q8_0 weights to int8 (Q8_0 blocks). How much that alone changes is measured beside it:
  transformers with nothing changed but that rounding, in float32 and in float64. (The two differ among themselves as
  much as either differs from llama.cpp: sums in another order fall on other sides of a rounding step.)

llama.cpp keeps keys and values in float32 here and runs without flash attention (``--cache f16 --flash`` for its own
defaults). Prints JSON lines. Exit code 1 when greedy text differs at more than a near tie, when weights differ, or when
fewer than 97% of positions agree and fewer than the rounding explains (its own agreement less three standard errors).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from dense import dense, float32_model, margin
from llama_cpp import LlamaCpp
from prompts import prompt_ids
from transformers import PreTrainedModel

import qbench
from qbench.export.gguf import write
from qbench.formats.base import QuantizedTensor
from qbench.inputs import reference_source
from qbench.models.gguf_names import rotary_heads, rows_to_gguf, to_gguf
from qbench.models.source import ModelSource, open_model
from qbench.recipe import Recipe

NEAR_TIE = 0.05
AGREEMENT = 0.97


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded as llama.cpp rounds activations: int8 in blocks of 32 with a float16 scale."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0).round()
    return (codes * scale.half().to(x.dtype)).flatten(-2)


def rounding_model(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' network of `source` with the inputs of quantized linears rounded to Q8_0."""
    model = float32_model(source).to(dtype)
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if weight in source.tensors and isinstance(source.load(weight), QuantizedTensor):
            module.register_forward_pre_hook(lambda _, inputs: (q8_0(inputs[0]),))
    return model


@torch.inference_mode()
def first_tokens(model: PreTrainedModel, rows: list[list[int]]) -> np.ndarray:
    """The likeliest next id after each beginning of each row."""
    return np.concatenate([model(torch.tensor([row])).logits[0, :-1].argmax(-1).numpy() for row in rows])


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
            theirs = llama.greedy(prompt, count)
            while own and own[-1] in llm.engine.eos_token_ids:
                own = own[:-1]
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


def unequal_weights(source: ModelSource, path: Path) -> list[str]:
    """Quantized tensors of `source` whose values gguf-py reads otherwise from the file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    heads = source.config["num_attention_heads"], source.config["num_key_value_heads"]
    unequal = []
    for name in source.tensors:
        ours = source.load(name)
        if isinstance(ours, QuantizedTensor):
            own_name = str(to_gguf(name))
            theirs = gguf.quants.dequantize(tensors[own_name].data, tensors[own_name].tensor_type)
            count = rotary_heads(own_name, *heads) if source.config["model_type"] == "llama" else None
            values = dense(ours) if count is None else rows_to_gguf(dense(ours), count)
            if not np.array_equal(theirs, values.numpy()):
                unequal.append(name)
    return unequal


def teacher(
    name: str, source: ModelSource, path: Path, rows: list[list[int]], options: dict[str, Any]
) -> dict[str, Any]:
    """The exported file's weights and its likeliest next tokens against ours."""
    llm = qbench.LLM(source, dtype="float32", device="cpu", max_model_len=1024)
    top = [llm.engine.logits(hidden[:-1]).topk(2) for hidden in llm.engine.encode(rows)]
    ours = np.concatenate([each.indices[:, 0].numpy() for each in top])
    margins = np.concatenate([(each.values[:, 0] - each.values[:, 1]).numpy() for each in top])
    single, double = (first_tokens(rounding_model(source, kind), rows) for kind in (torch.float32, torch.float64))
    llama = LlamaCpp(path, **options)
    theirs = np.concatenate([llama.first_tokens(row) for row in rows])
    agrees = theirs == ours
    explained = float((single == ours).mean())
    floor = min(AGREEMENT, explained - 3 * math.sqrt(explained * (1 - explained) / len(ours)))
    unequal = unequal_weights(source, path)
    return {
        "teacher": name,
        "ok": not unequal and bool(agrees.mean() >= floor),
        "unequal_weights": unequal,
        "positions": len(ours),
        "top1_agreement": float(agrees.mean()),
        "median_margin_where_they_differ": float(np.median(margins[~agrees])),
        "largest_margin_where_they_differ": float(margins[~agrees].max(initial=0.0)),
        "rounding_alone_against_ours": explained,
        "rounding_alone_against_llama_cpp": float((single == theirs).mean()),
        "rounding_alone_float32_against_float64": float((single == double).mean()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--greedy", nargs="*", metavar="NAME")
    parser.add_argument("--teacher", nargs="*", metavar="NAME")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--positions", type=int, default=2044)
    parser.add_argument("--cache", choices=["f32", "f16"], default="f32")
    parser.add_argument("--flash", action="store_true")
    arguments = parser.parse_args()
    run, options = arguments.run, {"cache": arguments.cache, "flash": arguments.flash}
    recipe = Recipe.model_validate(json.loads((run / "run.json").read_text())["recipe"])
    files = {path.parents[1].name: path for path in sorted(run.glob("variants/*/gguf*/*.gguf"))}
    rows, left = [], arguments.positions
    for ids, _ in json.loads((run / "inputs.json").read_text())["windows"]:
        if left > 0:
            rows.append(ids[: left + 1])
            left -= len(rows[-1]) - 1

    def source(name: str) -> ModelSource:
        return reference_source(recipe) if name == "reference" else open_model(run / "variants" / name / "model")

    holds = True
    for name in ["reference", *files] if arguments.greedy is None else arguments.greedy:
        found = greedy(name, source(name), arguments.tokens, options)
        print(json.dumps(found), flush=True)
        holds &= found["ok"]
    for name in list(files) if arguments.teacher is None else arguments.teacher:
        found = teacher(name, source(name), files[name], rows, options)
        print(json.dumps(found), flush=True)
        holds &= found["ok"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
