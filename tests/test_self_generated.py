"""Calibration text that the model writes: it comes from the model's own distribution, and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench import self_generated
from qbench.errors import QbenchError
from qbench.models.source import open_model
from qbench.models.tokenizer import load_tokenizer
from qbench.recipe import Model
from qbench.recipe_data import Calibration
from qbench.self_generated import generated_rows


def rows_of(model: Path, seed: int = 0, **fields: Any) -> list[list[int]]:
    source = open_model(model)
    wanted = Calibration.model_validate({"data": "self-generated", "rows": 6, "seq_len": 24, **fields})
    return generated_rows(source, load_tokenizer(source), wanted, seed, Model(source=str(model), dtype="float32"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "generated"


def test_rows_are_full_start_differently_and_are_kept(tiny_llama: Path, cache: Path) -> None:
    rows = rows_of(tiny_llama)
    assert [len(row) for row in rows] == [24] * 6
    assert len({row[0] for row in rows}) > 3
    assert not {row[0] for row in rows} & {0, 1, 2}  # special tokens start no text
    assert len(list(cache.iterdir())) == 1
    assert rows_of(tiny_llama) == rows
    assert len(list(cache.iterdir())) == 1


def test_what_is_kept_is_not_written_again(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(tiny_llama)
    monkeypatch.setattr(self_generated, "_write_on", lambda *_: pytest.fail("written again"))
    assert rows_of(tiny_llama) == rows


def test_the_seed_and_the_temperature_decide(tiny_llama: Path, cache: Path) -> None:
    rows = rows_of(tiny_llama)
    for path in cache.iterdir():
        path.unlink()
    assert rows_of(tiny_llama) == rows
    assert rows_of(tiny_llama, seed=1) != rows
    assert rows_of(tiny_llama, sampling={"temperature": 0.5}) != rows
    assert [row[0] for row in rows_of(tiny_llama, sampling={"start": "bos"})] == [1] * 6


def test_a_cold_model_writes_what_transformers_finds_likeliest(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for row in rows_of(tiny_llama, sampling={"top_k": 1}):
        with torch.no_grad():
            likeliest = model(torch.tensor([row])).logits[0].argmax(-1).tolist()
        assert row[1:] == likeliest[:-1]


def test_rows_of_documents_end_where_the_text_does(tiny_llama: Path) -> None:
    rows = rows_of(tiny_llama, rows=16, seq_len=100, packing="documents", sampling={"temperature": 10.0})
    ended = [row for row in rows if len(row) < 100]
    assert ended
    assert all(row[-1] == 2 and 2 not in row[:-1] for row in ended)


def test_no_beginning_of_text_token(tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    tokenizer = load_tokenizer(source)
    tokenizer.bos_token = None
    wanted = Calibration.model_validate({"data": "self-generated", "sampling": {"start": "bos"}})
    with pytest.raises(QbenchError, match=r"start is bos; the tokenizer has no such token\. Allowed: random"):
        generated_rows(source, tokenizer, wanted, 0, Model(source=str(tiny_llama)))
