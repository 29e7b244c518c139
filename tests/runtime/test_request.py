from __future__ import annotations

import math
import subprocess
import sys

import pytest

from qbench.errors import QbenchError
from qbench.runtime.request import SamplingParams


@pytest.mark.trap(57)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", "END"),
        ("stop", [""]),
        ("stop_token_ids", [1.0]),
        ("temperature", "hot"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(QbenchError, match=rf"{field} is .*; it must be"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_the_borders_are_allowed() -> None:
    SamplingParams(max_tokens=10**9, temperature=0, top_k=0, top_p=1, min_p=1, seed=2**63 - 1, stop=["a"])


def test_the_bookkeeping_imports_no_torch() -> None:
    modules = "request, block_pool, prefix_cache, scheduler"
    code = f"import sys; from qbench.runtime import {modules}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
