"""Cutting one long text into the windows that a model is scored on."""

from __future__ import annotations

from typing import NamedTuple

from qbench.errors import QbenchError


class Window(NamedTuple):
    """`token_ids` go through the model; the first `num_context` (>= 1) of them are not scored."""

    token_ids: list[int]
    num_context: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_context


def windows(tokens: list[int], seq_len: int, stride: int | None = None, bos: int | None = None) -> list[Window]:
    """Windows of at most `seq_len` ids in which every token of the text but the first is scored exactly once.

    Each window moves `stride` tokens on; what it repeats of the one before is context. The default is the largest
    stride, with one token of context. `bos` (given when the tokenizer's own default adds one) is put in front of
    every window and counts toward `seq_len`; it is context only, so the same tokens are scored with and without.
    Raises `QbenchError` when the text, `seq_len` or `stride` leaves nothing to score or to see.
    """
    prefix = [] if bos is None else [bos]
    body = seq_len - len(prefix)
    if body < 2:
        raise QbenchError(f"evaluate: seq_len {seq_len} is too short: at least {2 + len(prefix)} is needed.")
    if stride is None:
        stride = body - 1
    if not 1 <= stride < body:
        raise QbenchError(f"evaluate: stride {stride} with seq_len {seq_len}: allowed are 1 to {body - 1}.")
    if len(tokens) < 2:
        raise QbenchError(f"evaluate: a text of {len(tokens)} tokens has nothing to score; at least 2 are needed.")
    cut = [Window(prefix + tokens[:body], len(prefix) + 1)]
    end = body
    while end < len(tokens):
        start, scored_from = end + stride - body, end
        end += stride
        cut.append(Window(prefix + tokens[start:end], len(prefix) + scored_from - start))
    return cut
