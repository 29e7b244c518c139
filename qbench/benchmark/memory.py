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
    """The process's largest resident set since `reset_peak_memory` (since its start, outside Linux), and on an
    accelerator what torch held there at most. Bytes."""
    rows: list[Measured] = [("peak_memory_bytes", _process_peak(), {"where": "process"})]
    if device.type == "cuda":
        rows.append(("peak_memory_bytes", torch.cuda.max_memory_allocated(device), {"where": "accelerator"}))
    return rows


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak from what is held now. What earlier work of this process still holds counts on: measure
    in a fresh process to compare variants."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _process_peak() -> int:
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
