"""The few names that notebooks use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.lazy import lazy_import
from qbench.result import read_results

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas")


def results(run_dir: str | Path) -> pd.DataFrame:
    """Every result row of a run: variant, metric, value, unit, then a column a detail, then a column a provenance key
    (`detail_percentile`, `provenance_dtype`, `provenance_window_seq_len`, ...; NaN where a row has none).

    Where a metric has a row without details, that is the number itself, and the others are parts of it (a window, a
    bucket of confidence). Raises `QbenchError` when the folder holds no results.
    """
    rows = [asdict(row) for row in read_results(Path(run_dir) / "results.jsonl")]
    frame = pd.json_normalize(rows, sep="_")
    order = {"detail": 1, "provenance": 2}
    return frame[sorted(frame.columns, key=lambda name: order.get(str(name).partition("_")[0], 0))]
