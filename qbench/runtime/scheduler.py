"""What to compute next. (Dataclasses first.)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step."""

    request_id: str
    token_ids: list[int]  # the ids to compute in this step
    start: int  # position of token_ids[0]: the tokens computed before this step
    block_table: list[int]  # physical block ids, enough for start + len(token_ids) tokens
    samples: bool  # this chunk reaches the end of the known tokens: its last position's logits are sampled


@dataclass(frozen=True)
class ScheduledStep:
    """What one forward pass computes."""

    requests: list[ScheduledRequest]
