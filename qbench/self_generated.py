"""Calibration text that the model itself writes (LLM-QAT, arXiv 2305.17888): no data set, and no mismatch with what
the model has learned. Sampled in the built-in runtime, row by row seeded, kept in the cache."""

from __future__ import annotations

import json
from typing import Any

import torch

import qbench
from qbench.calibration.rows import default_bos
from qbench.errors import QbenchError
from qbench.models.source import ModelSource
from qbench.progress import console, progress_bar
from qbench.recipe import Model, stage_key
from qbench.recipe_data import Calibration
from qbench.resources import cache_dir, written_whole

AT_ONCE = 32  # rows that are written together


def generated_rows(
    source: ModelSource, tokenizer: Any, wanted: Calibration, seed: int, model: Model
) -> list[list[int]]:
    """`wanted.rows` rows of token ids.

    Each begins with one token: drawn from the vocabulary without the special tokens (after the beginning-of-text
    token where the tokenizer puts one by default), or beginning-of-text itself. Packed rows all have `seq_len` tokens:
    the model writes on past the end of a text. Rows of documents end with it. Raises `QbenchError` when there is no
    beginning-of-text token to start with.
    """
    parts = (wanted.sampling, wanted.rows, wanted.seq_len, wanted.packing, seed, model.dtype, model.device)
    path = cache_dir() / "generated" / f"{stage_key(qbench.__version__, source.revision, *parts)}.json"
    if path.is_file():
        rows: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
        return rows
    starts = _starts(tokenizer, wanted, seed)
    console.print(f"{source.location} writes its own calibration text ({wanted.rows} rows of {wanted.seq_len}) ...")
    rows = _write_on(source, starts, wanted, seed, model)
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(rows), encoding="utf-8")
    return rows


def _starts(tokenizer: Any, wanted: Calibration, seed: int) -> list[list[int]]:
    bos = tokenizer.bos_token_id
    if wanted.sampling.start == "bos":
        if bos is None:
            raise QbenchError("calibration.sampling.start is bos; the tokenizer has no such token. Allowed: random.")
        return [[bos]] * wanted.rows
    before = [] if (first := default_bos(tokenizer)) is None else [first]
    usual = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    drawn = torch.randint(len(usual), (wanted.rows,), generator=torch.Generator().manual_seed(seed))
    return [[*before, usual[i]] for i in drawn.tolist()]


def _write_on(
    source: ModelSource, starts: list[list[int]], wanted: Calibration, seed: int, model: Model
) -> list[list[int]]:
    from qbench.runtime.llm import LLM
    from qbench.runtime.request import SamplingParams

    rows = []
    llm = LLM(source, dtype=model.dtype, device=model.device, max_num_seqs=AT_ONCE, max_model_len=wanted.seq_len)
    options = wanted.sampling.model_dump(exclude={"start"})
    with progress_bar("write calibration text", len(starts)) as bar:
        for first in range(0, len(starts), AT_ONCE):
            batch = starts[first : first + AT_ONCE]
            params = [
                SamplingParams(
                    max_tokens=wanted.seq_len - len(start),
                    seed=(seed + first + i) % 2**63,
                    ignore_eos=wanted.packing == "packed",
                    **options,
                )
                for i, start in enumerate(batch)
            ]
            for start, output in zip(batch, llm.generate(batch, params), strict=True):
                rows.append(start + output.outputs[0].token_ids)
            bar.advance(len(batch))
    return rows
