"""Documents to token rows. Rows are never padded: they may differ in length, and are batched with their equals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Literal

from jinja2 import TemplateError

from qbench.calibration.data import TextData
from qbench.calibration.documents import Message
from qbench.errors import QbenchError

Packing = Literal["packed", "documents"]


def token_stream(data: TextData, tokenizer: Any) -> list[int]:
    """All documents as one stream: neighbouring texts joined by a blank line and tokenized as one, without special
    tokens; conversations one after the other, with the special tokens that the chat template writes."""
    stream: list[int] = []
    for is_text, documents in groupby(data.documents, lambda document: isinstance(document, str)):
        if is_text:
            stream += _tokens("\n\n".join(str(document) for document in documents), tokenizer)
        else:
            for document in documents:
                assert isinstance(document, list)
                stream += chat_tokens(document, tokenizer, data.name)
    return stream


def chat_tokens(messages: list[Message], tokenizer: Any, name: str) -> list[int]:
    """A conversation in the model's own chat template. The template writes every special token, the tokenizer adds
    none: so there is one beginning-of-text token if the template writes it. Raises `QbenchError` if there is no
    template, or it refuses the messages; `name` is that of the data."""
    if tokenizer.chat_template is None:
        raise QbenchError(f"Data {name} holds conversations; this model has no chat template to write them in.")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError as error:
        raise QbenchError(f"Data {name}: the model's chat template refuses a conversation: {error}") from error
    return _tokens(text, tokenizer)


def token_rows(data: TextData, tokenizer: Any, rows: int, seq_len: int, packing: Packing) -> list[list[int]]:
    """At most `rows` rows of at most `seq_len` token ids.

    ``packed``: cut from the joined documents one after the other; every row but perhaps the last is full.
    ``documents``: each document begins a row, and goes on in further rows when it is longer than one.
    Every row begins with the beginning-of-text token that the tokenizer puts before a text by default, if it does:
    models that have one are lost without it, and are measured with it (`evaluate.windows`). No token of text is dropped
    before the last row asked for. Raises `QbenchError` when there are fewer than two tokens.
    """
    found: list[list[int]] = []
    bos = default_bos(tokenizer)
    for stream in [token_stream(data, tokenizer)] if packing == "packed" else _each(data, tokenizer):
        found += _cut(stream, seq_len, bos)
        if len(found) >= rows:
            break
    found = found[:rows]
    tokens = sum(map(len, found))
    if tokens < 2:
        raise QbenchError(f"Calibration data {data.name}: {tokens} tokens of text. Allowed: at least 2.")
    return found


def default_bos(tokenizer: Any) -> int | None:
    """The id that the tokenizer's own default puts in front of a text, if it does."""
    ids = tokenizer("a")["input_ids"]
    first: int | None = ids[0] if ids and ids[0] == tokenizer.bos_token_id else None
    return first


def _cut(stream: list[int], seq_len: int, bos: int | None) -> Iterator[list[int]]:
    start = 0
    while start < len(stream):
        front = [] if bos is None or stream[start] == bos else [bos]
        stop = start + seq_len - len(front)
        yield [*front, *stream[start:stop]]
        start = stop


def _each(data: TextData, tokenizer: Any) -> Iterable[list[int]]:
    for document in data.documents:
        if isinstance(document, str):
            yield _tokens(document, tokenizer, special=True)
        else:
            yield chat_tokens(document, tokenizer, data.name)


def _tokens(text: str, tokenizer: Any, special: bool = False) -> list[int]:
    """Not `verbose`: a text may be longer than the model's context, which the tokenizer would warn of."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
