"""GGUF tokenizers, token by token against llama.cpp reading the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qbench.export.gguf import write
from qbench.models.gguf_source import GGUFSource, open_gguf
from qbench.models.pre_tokenizers import PRE_TOKENIZERS
from qbench.models.source import ModelSource, open_model
from tests.llama_cpp import LlamaCpp
from tests.models.gguf_bytes import patched
from tests.tiny import CHAT_TEMPLATE, make_tiny_llama

TEXTS = [
    "",
    " ",
    "   a",
    "a  b   c    d     ",
    "\n\n\n",
    "a\t\tb \n c\r\n\r\n d\n  e",
    "Hello 1234 world's 5",
    "I'll they're IT'S don't 'tis CAN'T we'Ve",
    "naïve café Straße ÜBER ПРИВЕТ мир",
    "日本語テキスト 한국어 नमस्ते ไทย مرحبا",
    "🙂👩\u200d👩\u200d👧 \u00a0x\u3000y \u200b\ufeff",
    "def f(x):\n    return x**2  # ½ ²³ Ⅷ 12,345.67e-8\n\n\n\tfor i in range(10): pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "100% $5.00 #tag @me [x](y) {z} <|endoftext|>abc -- ... !!",
    "it's\u2019s ‘q’ “d” — –…",
    "camelCase HTTPServer snake_case 3D x1y2 0x1F",
]
CORPUS = [text for text in TEXTS if "<|" not in text] * 2 + [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps for 100 years in 2024.",
    "We'll see what they've done; it's the worst of times, it was the best of times.",
]


def tokenizer_of(source: GGUFSource, folder: Path) -> PreTrainedTokenizerFast:
    source.write_side_files(folder)
    (folder / "config.json").write_text(json.dumps(source.config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def assert_same_ids(path: Path, tokenizer: PreTrainedTokenizerFast, texts: list[str] = TEXTS) -> None:
    judge = LlamaCpp(path)
    ours = {text: tokenizer(text)["input_ids"] for text in texts}
    assert ours == {text: judge.tokenize(text) for text in texts}


def test_default_model(tmp_path: Path, default_model: ModelSource) -> None:
    assert isinstance(default_model, GGUFSource)
    tokenizer = tokenizer_of(default_model, tmp_path)
    assert_same_ids(default_model.file.paths[0], tokenizer)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("Hi 42")["input_ids"] == [26843, 216, 36, 34]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.trap(34)
def test_every_end_token_is_kept(tmp_path: Path, default_model: ModelSource) -> None:
    default_model.write_side_files(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}


def tiny_with_rule(folder: Path, pre: str) -> Path:
    """A tiny model whose byte-level BPE was trained under the rule called `pre`."""
    known = PRE_TOKENIZERS[pre]
    empty = json.loads(Tokenizer(models.BPE(ignore_merges=known.ignore_merges)).to_str())
    tokenizer = Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": known.rule, "normalizer": known.normalizer}))
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    make_tiny_llama(folder, vocab_size=704, num_hidden_layers=1)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[1], eos_token=specials[2])
    fast.save_pretrained(folder)
    return folder


@pytest.mark.trap(39)
@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken"])
def test_named_rules_cut_text_as_llama_cpp_does(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "model.gguf"
    write(open_model(tiny_with_rule(tmp_path / "hf", pre)), path)
    source = open_gguf(path)
    assert source.file.metadata["tokenizer.ggml.pre"] == pre
    texts = TEXTS if pre != "tekken" else [text for text in TEXTS if text.isascii()]  # see `pre_tokenizers`
    assert_same_ids(path, tokenizer_of(source, tmp_path), texts)


@pytest.mark.trap(44)
@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, tiny_llama: Path, bos: bool, eos: bool) -> None:
    write(open_model(tiny_llama), tmp_path / "plain.gguf")
    changes = {"tokenizer__ggml__add_bos_token": bos, "tokenizer__ggml__add_eos_token": eos}
    path = patched(tmp_path / "plain.gguf", tmp_path, **changes)
    tokenizer = tokenizer_of(open_gguf(path), tmp_path)
    assert_same_ids(path, tokenizer)
    ids = tokenizer("abc")["input_ids"]
    assert (ids.count(1), ids.count(2)) == (bos, eos)
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary(tmp_path: Path, prefix: bool) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(text.replace("\n", " ") for text in CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=520, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix,
        character_coverage=0.99, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "sp.model"))
    count = model.vocab_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    write(open_model(make_tiny_llama(tmp_path / "hf", vocab_size=count)), tmp_path / "plain.gguf")
    path = patched(
        tmp_path / "plain.gguf",
        tmp_path,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default",
        tokenizer__ggml__tokens=[model.id_to_piece(i) for i in range(count)],
        tokenizer__ggml__scores=np.array([model.get_score(i) for i in range(count)], np.float32),
        tokenizer__ggml__token_type=np.array(kinds, np.int32),
        tokenizer__ggml__add_space_prefix=prefix,
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__unknown_token_id=0,
    )
    tokenizer = tokenizer_of(open_gguf(path), tmp_path)
    assert_same_ids(path, tokenizer)
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == model.encode(text)
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text

    again = tmp_path / "again.gguf"
    write(open_gguf(path), again)
    assert_same_ids(again, tokenizer)
