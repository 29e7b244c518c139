"""Text out of tokens as they come, in pieces that never have to be taken back.

A token can end inside a character, and a stop text can begin inside one token and end in another. Both are held
back until it is certain what they are, so the pieces joined are always the final text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are no whole character


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]: ...


class Detokenizer:
    """Turns tokens into whole characters. Only a short window of tokens is decoded each time."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # the window: some tokens of context (a decoder may drop a first space), then the new ones
        self._boundary = 0  # tokens before it are whole characters
        self._emitted = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes."""
        self._ids.append(token_id)
        text = self._window()
        stable = text.rstrip(REPLACEMENT)
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if piece and stable == text:
            self._start, self._boundary = self._boundary, len(self._ids)
            self._emitted = len(self._window())
        return piece

    def flush(self) -> str:
        """What is left when no token follows; bytes that never became a character are U+FFFD."""
        text = self._window()
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _window(self) -> str:
        ids = self._ids[self._start :]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class StopTexts:
    """Lets text through up to the first stop text, which is the one that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # the longest end of the text so far that a stop text could begin with
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown now. Sets `found` when a stop text is complete."""
        text = self._held + piece
        matches = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if matches:
            end, self.found = min(matches, key=lambda match: (match[0], -len(match[1])))
            self._held = ""
            return text[: end - len(self.found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
