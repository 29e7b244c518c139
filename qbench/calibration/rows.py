"""Documents to token rows."""

from __future__ import annotations

from typing import Any

from qbench.calibration.data import TextData
from qbench.errors import QbenchError


def token_stream(data: TextData, tokenizer: Any) -> list[int]:
    """All documents, joined by a blank line and tokenized as one text, without special tokens."""
    text = "\n\n".join(data.documents)  # longer than the model's context, which the tokenizer would warn of
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def packed_rows(data: TextData, tokenizer: Any, rows: int, seq_len: int) -> list[list[int]]:
    """At most `rows` rows of `seq_len` token ids, cut from the joined documents one after the other.

    No token is dropped before the last row asked for: a last row that the text does not fill is kept as it is.
    Raises `QbenchError` when the text gives fewer than two tokens.
    """
    stream = token_stream(data, tokenizer)[: rows * seq_len]
    if len(stream) < 2:
        raise QbenchError(f"Calibration data {data.name}: {len(stream)} tokens of text. Allowed: at least 2.")
    return [stream[i : i + seq_len] for i in range(0, len(stream), seq_len)]
