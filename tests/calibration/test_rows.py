"""Documents to token rows: what each packing does, and special tokens exactly once."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from qbench.calibration.data import TextData
from qbench.calibration.rows import Packing, chat_tokens, token_rows, token_stream
from qbench.errors import QbenchError
from tests.tiny import byte_tokenizer

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
BOS, EOS = 1, 2


def tokenizer_that_adds_bos():  # type: ignore[no-untyped-def]
    tokenizer = byte_tokenizer(259)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", BOS)]
    )
    assert tokenizer("a")["input_ids"][0] == BOS
    return tokenizer


def test_rows_follow_each_other() -> None:
    tokenizer = byte_tokenizer(259)
    rows = token_rows(TextData("abc", None, ["abcdefghij" * 10]), tokenizer, 3, 16, "packed")
    assert tokenizer.decode([id for row in rows for id in row]) == ("abcdefghij" * 10)[:48]


@pytest.mark.trap(11)
@pytest.mark.parametrize(("packing", "lengths"), [("packed", [500]), ("documents", [50] * 10)])
def test_none_of_the_tokens_of_short_documents_is_dropped(packing: Packing, lengths: list[int]) -> None:
    length = 48 if packing == "packed" else 50  # packed documents have a blank line between them
    data = TextData("ten", None, ["x" * length] * 9 + ["x" * 50])
    rows = token_rows(data, byte_tokenizer(259), 32, 512, packing)  # a token a byte
    assert [len(row) for row in rows] == lengths


@pytest.mark.trap(11)
@pytest.mark.parametrize("packing", ["packed", "documents"])
def test_no_usable_row_is_refused(packing: Packing) -> None:
    with pytest.raises(QbenchError, match=r"Calibration data one: 1 tokens of text. Allowed: at least 2\."):
        token_rows(TextData("one", None, ["x"]), byte_tokenizer(259), 1, 8, packing)


def test_documents_each_begin_a_row_and_are_cut_where_it_ends() -> None:
    data = TextData("three", None, ["abcde", "fg", "hij"])
    tokenizer = byte_tokenizer(259)
    rows = token_rows(data, tokenizer, 8, 4, "documents")
    assert [tokenizer.decode(row) for row in rows] == ["abcd", "e", "fg", "hij"]
    assert len(token_rows(data, tokenizer, 2, 4, "documents")) == 2
    packed = token_rows(data, tokenizer, 8, 4, "packed")
    assert [tokenizer.decode(row) for row in packed] == ["abcd", "e\n\nf", "g\n\nh", "ij"]


def test_every_row_begins_with_the_bos_that_the_tokenizer_adds_as_evaluation_windows_do() -> None:
    tokenizer = tokenizer_that_adds_bos()
    data = TextData("three", None, ["abcde", "fg", "hij"])
    documents = token_rows(data, tokenizer, 8, 4, "documents")
    packed = token_rows(data, tokenizer, 8, 4, "packed")
    for rows, texts in (
        (documents, ["abc", "de", "fg", "hij"]),
        (packed, ["abc", "de\n", "\nfg", "\n\nh", "ij"]),
    ):
        assert [row.count(BOS) for row in rows] == [row[0] == BOS for row in rows] == [True] * len(rows)
        assert [tokenizer.decode(row[1:]) for row in rows] == texts


@pytest.mark.trap(44)
@pytest.mark.parametrize("packing", ["packed", "documents"])
def test_a_conversation_has_the_bos_its_template_writes_and_no_other(packing: Packing) -> None:
    tokenizer = tokenizer_that_adds_bos()
    tokenizer.chat_template = WITH_BOS
    rows = token_rows(TextData("chat", None, [TALK]), tokenizer, 1, 64, packing)
    assert rows == [[BOS, *tokenizer("Hi", add_special_tokens=False)["input_ids"], EOS,
                     *tokenizer("Yo", add_special_tokens=False)["input_ids"], EOS]]  # fmt: skip


def test_conversations_and_texts_keep_their_order_in_one_stream() -> None:
    tokenizer = byte_tokenizer(259)
    stream = token_stream(TextData("mix", None, ["a", "b", TALK, "c"]), tokenizer)
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert tokenizer.decode(stream) == f"a\n\nb{chat}c"
    assert stream.count(BOS) == stream.count(EOS) == 2  # the marks became special tokens


def test_a_model_without_a_template_refuses_conversations() -> None:
    tokenizer = byte_tokenizer(259)
    tokenizer.chat_template = None
    with pytest.raises(QbenchError, match="Data talk holds conversations; this model has no chat template"):
        chat_tokens(TALK, tokenizer, "talk")


def test_a_template_that_refuses_a_conversation_says_so() -> None:
    tokenizer = byte_tokenizer(259)
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(QbenchError, match="Data talk: the model's chat template refuses a conversation: only users"):
        chat_tokens(TALK, tokenizer, "talk")
