"""From the times of requests to latency percentiles and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qbench.benchmark.closed_loop import RequestTimes

Measured = tuple[str, float, dict[str, Any]]  # metric, value, detail: the input of `result.make_results`
PERCENTILES = (50, 90, 99)  # linear interpolation between the two nearest values, numpy's default


def latency_metrics(requests: Sequence[RequestTimes], concurrency: int) -> list[Measured]:
    """Time to first token from submission, every gap between tokens, mean time per output token of each request,
    and output tokens and requests a second over the wall time (first submission to last token). Seconds.

    Gaps and time per output token do not exist for requests of one token and are then left out.
    """
    ttft = [request.time_to_first_token for request in requests]
    gaps = [gap for request in requests for gap in request.gaps]
    tpot = [value for request in requests if (value := request.time_per_output_token) is not None]
    wall = max(r.token_times[-1] for r in requests) - min(r.submitted for r in requests)
    at: dict[str, Any] = {"concurrency": concurrency}
    rows: list[Measured] = []
    for metric, values in (("ttft_s", ttft), ("itl_s", gaps), ("tpot_s", tpot)):
        if values:
            found = np.percentile(values, PERCENTILES).tolist()
            rows += [(metric, value, {**at, "percentile": p}) for p, value in zip(PERCENTILES, found, strict=True)]
    rows += [
        ("output_tokens_per_s", sum(len(r.token_times) for r in requests) / wall, at),
        ("requests_per_s", len(requests) / wall, at),
        ("wall_s", wall, at),
    ]
    return rows
