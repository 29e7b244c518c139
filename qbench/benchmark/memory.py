"""Peak memory of this process and of its accelerator."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch

Measured = tuple[str, float, dict[str, Any]]
STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> list[Measured]:
    """The process's largest resident set since its start, and on an accelerator what torch held there at most. Bytes.

    What earlier work of this process took counts: measure in a fresh process to compare variants.
    """
    rows: list[Measured] = [("peak_memory_bytes", _process_peak(), {"where": "process"})]
    if device.type == "cuda":
        rows.append(("peak_memory_bytes", torch.cuda.max_memory_allocated(device), {"where": "accelerator"}))
    return rows


def _process_peak() -> int:
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
