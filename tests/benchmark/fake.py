"""An engine whose every delay is known: prefill and decode steps move a clock of its own."""

from dataclasses import dataclass, field

from qbench.runtime.request import SamplingParams

PREFILL_S, DECODE_S = 0.5, 0.1


@dataclass
class Output:
    request_id: str
    token_ids: list[int]
    finished: bool


@dataclass
class FakeEngine:
    """A step costs 0.1 s and gives every request `tokens_per_step` tokens, 0.5 s more when a request is new."""

    tokens_per_step: int = 1
    stops_after: int = 10**9
    now: float = 100.0
    left: dict[str, int] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    prompts: list[list[int]] = field(default_factory=list)
    most_running: int = 0

    def clock(self) -> float:
        return self.now

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        assert request_id not in self.left
        assert params.ignore_eos
        self.left[request_id] = min(params.max_tokens, self.stops_after)
        self.new.add(request_id)
        self.prompts.append(prompt_token_ids)

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Output]:
        self.most_running = max(self.most_running, len(self.left))
        self.now += DECODE_S + (PREFILL_S if self.new else 0)
        self.new.clear()
        outputs = []
        for request_id in list(self.left):
            count = min(self.tokens_per_step, self.left[request_id])
            self.left[request_id] -= count
            finished = self.left[request_id] == 0
            if finished:
                del self.left[request_id]
            outputs.append(Output(request_id, [7] * count, finished))
        return outputs
