"""Freezes the results of a run as a baseline: ``python eval/freeze.py RUN eval/baselines/NAME.json``.

Kept are the headline numbers (one value a variant and metric, no single windows, layers or confidence buckets) and what
must be known of how they were measured. Quality and sizes should come out the same anywhere up to float sums; speed and
memory belong to the machine that is named.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qbench.result import METRICS, Result, read_results

LEFT_OUT = {"window", "layer", "module", "confidence", "stage"}  # details of rows that are not headline numbers
COMMON = ("recipe_hash", "model", "model_revision", "off_grid", "seed", "data", "data_hash", "window")
ENGINE = ("dtype", "device", "threads", "engine", "engine_version", "torch_version", "workload", "prefix_cache")
MACHINE = ("python", "transformers", "cores", "features", "memory", "cuda")


def frozen(rows: list[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """The content of a baseline file."""
    kept = [row for row in rows if not LEFT_OUT & row.detail.keys() and METRICS[row.metric].family != "process"]
    conditions = {key: row.provenance[key] for row in kept for key in (*COMMON, *ENGINE) if key in row.provenance}
    values: dict[str, dict[str, float]] = {}
    for row in kept:
        detail = ", ".join(f"{key} {value}" for key, value in row.detail.items())
        name = f"{row.metric} ({detail})" if detail else row.metric
        values.setdefault(row.variant, {})[name] = float(f"{row.value:.8g}")
    kernels = {row.variant: row.provenance["kernel"] for row in kept if "kernel" in row.provenance}
    return {"conditions": conditions, "machine": machine, "kernels": kernels, "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    about = json.loads((arguments.run / "run.json").read_text(encoding="utf-8"))["machine"]
    machine = {key: about[key] for key in MACHINE if key in about}
    content = frozen(read_results(arguments.run / "results.jsonl"), machine)
    arguments.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
