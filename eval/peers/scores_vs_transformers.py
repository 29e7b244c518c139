"""Perplexity, KL divergence and top-1 agreement of a finished run, computed again by transformers alone.

    python eval/peers/scores_vs_transformers.py RUN [--only VARIANT...] [--windows N]

RUN is the folder `qbench run` made. Each model's weights are dequantized into transformers' float32 network, which
scores the run's own windows (`inputs.json`) window by window with full logits in float64; nothing of qbench's runtime
or of its stored reference states is used. Prints each score next to the one in `results.jsonl`. With fewer windows than
the run had only the likelihoods can be compared (they are recorded a window); KL and top-1 are then shown alone.
Exit code 1 when a perplexity is off by more than 0.1% or a KL by more than 1% (and 1e-6 nats).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from dense import float32_model
from runs import recipe_of, source_of
from transformers import PreTrainedModel

from qbench.result import Result, read_results

Cut = tuple[list[int], int]


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, ids: list[int], context: int) -> torch.Tensor:
    """Float64 ``[scored, vocab]`` of one window's scored positions."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, context - 1 : -1]
    return logits.double().log_softmax(-1)


def scores(model: PreTrainedModel, reference: PreTrainedModel, windows: list[Cut]) -> tuple[list[torch.Tensor], ...]:
    """Negative log-likelihoods, KL(reference || model) and top-1 agreement at each position, a tensor a window."""
    nll, kl, top1 = [], [], []
    for ids, context in windows:
        found = log_probabilities(model, ids, context)
        expected = found if model is reference else log_probabilities(reference, ids, context)
        nll.append(-found.gather(1, torch.tensor(ids[context:])[:, None])[:, 0])
        kl.append((expected.exp() * (expected - found)).sum(1))
        top1.append((expected.argmax(1) == found.argmax(1)).double())
    return nll, kl, top1


def recorded(rows: list[Result], variant: str, metric: str, **detail: object) -> float:
    return next(r.value for r in rows if (r.variant, r.metric, r.detail) == (variant, metric, detail))


def compare(name: str, rows: list[Result], measured: tuple[list[torch.Tensor], ...], whole: bool) -> bool:
    """Prints one variant's line; whether its scores hold."""
    nll, kl, top1 = (torch.cat(values).mean().item() for values in measured)
    counts = [len(values) for values in measured[0]]
    of_window = [recorded(rows, name, "nll", window=i) for i in range(len(counts))]
    theirs = sum(n * value for n, value in zip(counts, of_window, strict=True)) / sum(counts)
    worst = max(abs(a.mean().item() - b) for a, b in zip(measured[0], of_window, strict=True))
    off = math.expm1(theirs - nll)
    line = f"{name}: perplexity {math.exp(nll):.5f}, recorded {math.exp(theirs):.5f} ({off:+.5%}; "
    line += f"worst window {worst:.1e} nats); KL {kl:.7f}, top-1 {top1:.5f}"
    holds = abs(off) < 1e-3
    if whole:
        kl_theirs, top1_theirs = recorded(rows, name, "kl_mean"), recorded(rows, name, "top1_agreement")
        line += f"; recorded KL {kl_theirs:.7f}, top-1 {top1_theirs:.5f}"
        holds &= abs(kl_theirs - kl) < 1e-6 + 0.01 * kl
    print(line, flush=True)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--only", nargs="+", metavar="VARIANT")
    parser.add_argument("--windows", type=int)
    arguments = parser.parse_args()
    run = arguments.run
    recipe = recipe_of(run)
    everything = json.loads((run / "inputs.json").read_text(encoding="utf-8"))["windows"]
    windows = everything[: arguments.windows]
    rows = read_results(run / "results.jsonl")
    reference = float32_model(source_of(run, recipe, "reference"))
    holds = True
    for name in arguments.only or ["reference", *recipe.variants]:
        model = reference if name == "reference" else float32_model(source_of(run, recipe, name))
        measured = scores(model, reference, windows)
        holds &= compare(name, rows, measured, whole=len(windows) == len(everything))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
