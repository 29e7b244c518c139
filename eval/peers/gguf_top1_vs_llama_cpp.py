"""Exported GGUF files of quantized variants: weights as gguf-py reads them, next tokens as llama.cpp computes them.

    python eval/peers/gguf_top1_vs_llama_cpp.py RUN [VARIANT...] [--positions 2044]

RUN is the folder `qbench run` made; the default is every variant that was exported to GGUF.

- The exported file's weights, dequantized by gguf-py, must equal the variant's own exactly.
- The likeliest next token after every beginning of the run's held-out windows, llama.cpp's against ours. llama.cpp
  rounds the activations that meet Q4_0 and Q8_0 weights to int8 (Q8_0 blocks). How much that alone changes is measured
  beside it: transformers with nothing changed but that rounding, in float32 and in float64. (The two differ among
  themselves as much as either differs from llama.cpp: sums in another order fall on other sides of a rounding step.)

llama.cpp keeps keys and values in float32 here and runs without flash attention (``--cache f16 --flash`` for its own
defaults). Prints a JSON line a variant. Exit code 1 when weights differ, or when fewer than 97% of positions agree and
fewer than the rounding explains (its own agreement with ours less three standard errors).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from dense import dense, float32_model
from llama_cpp import LlamaCpp, add_options, options_of
from runs import exported_files, recipe_of, source_of
from transformers import PreTrainedModel

import qbench
from qbench.formats.base import QuantizedTensor
from qbench.models.gguf_names import rotary_heads, rows_to_gguf, to_gguf
from qbench.models.source import ModelSource

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


def compare(
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
        "variant": name,
        "ok": not unequal and bool(agrees.mean() >= floor),
        "unequal_weights": unequal,
        "positions": len(ours),
        "top1_agreement": float(agrees.mean()),
        "median_margin_where_they_differ": None if agrees.all() else float(np.median(margins[~agrees])),
        "largest_margin_where_they_differ": float(margins[~agrees].max(initial=0.0)),
        "rounding_alone_against_ours": explained,
        "rounding_alone_against_llama_cpp": float((single == theirs).mean()),
        "rounding_alone_float32_against_float64": float((single == double).mean()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--positions", type=int, default=2044)
    add_options(parser)
    arguments = parser.parse_args()
    recipe, files = recipe_of(arguments.run), exported_files(arguments.run)
    rows: list[list[int]] = []
    left = arguments.positions
    for ids, _ in json.loads((arguments.run / "inputs.json").read_text(encoding="utf-8"))["windows"]:
        if left > 0:
            rows.append(ids[: left + 1])
            left -= len(rows[-1]) - 1
    holds = True
    for name in arguments.variants or files:
        source = source_of(arguments.run, recipe, name)
        found = compare(name, source, files[name], rows, options_of(arguments))
        print(json.dumps(found), flush=True)
        holds &= found["ok"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
