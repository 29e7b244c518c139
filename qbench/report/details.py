"""The longer tables of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from qbench.result import METRICS, Result


def latency(rows: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """One line a variant and concurrency: every percentile that was measured."""
    lines = []
    levels = sorted({row.detail["concurrency"] for row in rows if "concurrency" in row.detail})
    for name in names:
        for level in levels:
            found = {
                (row.metric, row.detail.get("percentile")): row.value
                for row in rows
                if row.variant == name and row.detail.get("concurrency") == level
            }
            if found:
                lines.append({"variant": name, "concurrency": level, "values": found})
    return lines


def confidence(rows: Sequence[Result], names: Sequence[str]) -> dict[str, Any]:
    """Mean divergence by how sure the reference was: the buckets, and values by variant."""
    inside = [row for row in rows if row.metric == "kl_mean" and "confidence" in row.detail]
    buckets = sorted({row.detail["confidence"] for row in inside}, key=lambda b: float(b.split("-")[0]))
    values = {(row.variant, row.detail["confidence"]): row.value for row in inside}
    counts = {
        row.detail["confidence"]: row.value
        for row in rows
        if row.metric == "scored_tokens" and "confidence" in row.detail
    }
    return {
        "buckets": buckets,
        "values": values,
        "counts": counts,
        "variants": [n for n in names if (n, buckets[0]) in values] if buckets else [],
    }


def made(rows: Sequence[Result], name: str) -> dict[str, float]:
    """How a variant was made, in numbers: the largest value of each metric of the process."""
    found: dict[str, float] = {}
    for row in rows:
        if row.variant == name and (
            METRICS[row.metric].family == "process" or row.metric in ("weight_bytes", "kv_cache_bytes")
        ):
            found[row.metric] = max(row.value, found.get(row.metric, row.value))
    return found


def provenance(rows: Sequence[Result]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """By provenance key: its values, each with the variants that have it (no variants: all)."""
    keys = list(dict.fromkeys(key for row in rows for key in row.provenance))
    found = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for row in rows:
            if key in row.provenance:
                names = values.setdefault(_plain(row.provenance[key]), [])
                if row.variant not in names:
                    names.append(row.variant)
        shown = [(value, names if len(values) > 1 else []) for value, names in values.items()]
        found.append((key.replace("_", " "), shown))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_plain(inner)}" for key, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value)
