"""What the runtime hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one request. `text` is what may be shown now; it never has to be taken back."""

    request_id: str
    token_ids: list[int]
    text: str
    finished: bool
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """A whole output.

    `token_ids` has every sampled token, an end-of-sequence token included; `text` leaves out special tokens, the
    token that stopped the output and everything from a stop text on.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop token id or stop text; None for the model's end of sequence


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completion (`outputs` has one)."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
