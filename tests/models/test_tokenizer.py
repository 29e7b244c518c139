"""Tokenizers against AutoTokenizer on the original folder; end tokens from every file that names one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qbench.errors import QbenchError
from qbench.models.source import open_model
from qbench.models.tokenizer import eos_token_ids, load_tokenizer
from tests.tiny import make_tiny_llama


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_equal_to_the_original(tiny_llama: Path) -> None:
    ours, theirs = load_tokenizer(open_model(tiny_llama)), AutoTokenizer.from_pretrained(tiny_llama)
    for text in ("", "hello there", "<|im_start|>user\nhi<|im_end|>", " naïve 日本 🙂\r\n"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.trap(34)
def test_end_tokens_are_the_union_of_all_files(folder: Path) -> None:
    for config, generation, expected in (
        (5, [7, 5], [2, 5, 7]),
        ([9, 5], 7, [2, 5, 7, 9]),
        (None, None, [2]),
        (0, 2, [0, 2]),
    ):
        for name, value in (("config.json", config), ("generation_config.json", generation)):
            fields = json.loads((folder / name).read_text()) | {"eos_token_id": value}
            (folder / name).write_text(json.dumps(fields))
        assert eos_token_ids(open_model(folder)) == expected
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(open_model(folder)) == [0, 2]


def test_no_tokenizer_files(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).unlink()
    with pytest.raises(QbenchError, match="no tokenizer files"):
        load_tokenizer(open_model(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "Unknown"}}'])
def test_a_malformed_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(QbenchError, match="tokenizer cannot be read"):
        load_tokenizer(open_model(folder))


@pytest.mark.trap(48)
def test_a_tokenizer_that_brings_code_is_refused_without_running_it(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QbenchError, match="tokenizer cannot be read"):
        load_tokenizer(open_model(folder))
    assert not marker.exists()


def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(QbenchError, match="eos_token_id is 'x', allowed"):
        eos_token_ids(open_model(folder))
