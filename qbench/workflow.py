"""A run: check everything, then for each variant compress, export, measure; then results and report.

Everything is kept under the run's folder and keyed by what it was made from, so the same command goes on after a kill
and a changed recipe redoes only what it changes:

    run.json        what ran, when, where: recipe, model, machine, warnings, timings
    results.jsonl   every number with its provenance;  report.html: the comparison
    inputs.json     the token ids of the evaluation windows and benchmark text
    variants/NAME/  see `qbench.stages`
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import qbench
from qbench.inputs import Inputs, reference_source
from qbench.models.json_file import read_json
from qbench.models.source import ModelSource
from qbench.peer_stages import stages_of
from qbench.progress import console
from qbench.recipe import Recipe, stage_key
from qbench.resolve import resolve
from qbench.resources import sole_user, written_whole
from qbench.result import Result, write_results
from qbench.scheme import Scheme
from qbench.stages import REFERENCE, Stages, check_folder, reference_rows
from qbench.validate import Plan, check


@dataclass(frozen=True)
class RunSummary:
    """A finished run."""

    out: Path
    report: Path
    results: list[Result]
    warnings: list[str]
    reused: list[str]  # variants of which nothing had to be done again
    seconds: float

    def print(self, to: Console) -> None:
        """The comparison table and where the report is."""
        from qbench.summary import print_summary

        print_summary(self.out, to)
        if self.reused:
            to.print(f"Unchanged since an earlier run: {', '.join(self.reused)}", markup=False, soft_wrap=True)
        to.print(f"Report: {self.report}  ({self.seconds:.0f} s)", markup=False, soft_wrap=True)

    @property
    def caveats(self) -> list[str]:
        """What to know before trusting the comparison, the warnings among them."""
        from qbench.summary import caveats_of

        return caveats_of(self.out)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "out": str(self.out),
            "report": str(self.report),
            "seconds": round(self.seconds, 3),
            "reused": self.reused,
            "warnings": self.warnings,
            "caveats": self.caveats,
            "results": [asdict(row) for row in self.results],
        }


def run(recipe: Recipe, out: Path, *, only: Iterable[str] | None = None) -> RunSummary:
    """Runs `recipe` into the folder `out`; `only` limits it to some variants (the reference is always measured).

    Raises `QbenchError` in the first seconds for whatever is wrong with recipe, model, data or folder.
    """
    check_folder(out, recipe)
    source = reference_source(recipe)
    chosen = recipe.chosen(only)
    plan = check(recipe, source, out=out, only=chosen)
    inputs = Inputs(recipe, source)
    warnings = plan.warnings + inputs.warnings(plan.schemes)
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    with sole_user(out):
        return _run_stages(recipe, out, inputs, plan, chosen, warnings)


def _run_stages(
    recipe: Recipe, out: Path, inputs: Inputs, plan: Plan, chosen: list[str], warnings: list[str]
) -> RunSummary:
    started = time.time()
    clock = time.perf_counter()
    provenance = _provenance(recipe, inputs)
    timings = _earlier_timings(out)
    record = _record(recipe, inputs, started, warnings)
    _write_json(out / "run.json", {**record, "stage_seconds": timings})
    inputs_file, inputs_key = _write_inputs(out, inputs)
    stages = {
        name: stages_of(recipe, name)(recipe, out, name, inputs, inputs_key, inputs_file, provenance, schemes)
        for name, schemes in _all_schemes(recipe, inputs.source, plan).items()
    }
    reused = [name for name in (REFERENCE, *chosen) if stages[name].complete]
    results = _collect(stages, inputs, provenance)
    for name in (REFERENCE, *chosen):
        if name not in reused:
            before = time.perf_counter()
            stages[name].run()
            timings[name] = round(time.perf_counter() - before, 3)
            _write_json(out / "run.json", {**record, "stage_seconds": timings})
        results = _collect(stages, inputs, provenance)
        write_results(out / "results.jsonl", results)
    exports = {name: stage.export_reports() for name, stage in stages.items()}
    whole = sum(timings.get(name, 0.0) for name in stages)  # also what an earlier call took for what is reused
    _write_json(out / "run.json", {**record, "seconds": whole, "stage_seconds": timings, "exports": exports})
    from qbench.report.page import write_report

    return RunSummary(out, write_report(out), results, warnings, reused, time.perf_counter() - clock)


def _all_schemes(recipe: Recipe, source: ModelSource, plan: Plan) -> dict[str, dict[str, Scheme] | None]:
    """Of the reference (none) and every variant, also those this call does not run: what an earlier one measured of
    them stays in the results."""
    others = {name: resolve(variant, source) for name, variant in recipe.variants.items() if name not in plan.schemes}
    return {REFERENCE: None} | {name: (plan.schemes | others)[name] for name in recipe.variants}


def _earlier_timings(out: Path) -> dict[str, float]:
    record = out / "run.json"
    earlier = read_json(record) if record.is_file() else {}
    timings: dict[str, float] = earlier.get("stage_seconds", {})
    return timings


def _collect(stages: dict[str, Stages], inputs: Inputs, provenance: dict[str, Any]) -> list[Result]:
    reference = stages[REFERENCE].rows()
    dtype = next((row.provenance["dtype"] for row in reference if "dtype" in row.provenance), "float32")
    bits = 32.0 if dtype == "float32" else 16.0
    rows = reference_rows(inputs.source, provenance, bits) + reference
    return rows + [row for name, stage in stages.items() if name != REFERENCE for row in stage.rows()]


def _provenance(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    found: dict[str, Any] = {
        "recipe_hash": recipe.hash,
        "model": recipe.model.source,
        "model_revision": inputs.source.revision,
        "off_grid": recipe.model.off_grid,
        "seed": recipe.seed,
    }
    if recipe.evaluate is not None or recipe.benchmark is not None:
        found |= {"data": inputs.evaluation.name, "data_hash": inputs.evaluation.sha256}
    if recipe.evaluate is not None:
        found["window"] = {"seq_len": recipe.evaluate.seq_len, "rows": len(inputs.windows), "bos": inputs.bos}
    return found


def _write_inputs(out: Path, inputs: Inputs) -> tuple[Path, str]:
    content: dict[str, Any] = {"windows": [], "tokens": []}
    if inputs.recipe.evaluate is not None:
        content["windows"] = [[window.token_ids, window.num_context] for window in inputs.windows]
    if inputs.recipe.benchmark is not None:
        content["tokens"] = inputs.evaluation_tokens
    path = out / "inputs.json"
    _write_json(path, content, indent=None)
    return path, stage_key(content)


def _record(recipe: Recipe, inputs: Inputs, started: float, warnings: list[str]) -> dict[str, Any]:
    from qbench.doctor import examine

    return {
        "recipe_name": recipe.name,
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "recipe_hash": recipe.hash,
        "model": recipe.model.source,
        "model_revision": inputs.source.revision,
        "off_grid_of": getattr(inputs.source, "off_grid_of", None),
        "architecture": _architecture(inputs.source),
        "calibration": inputs.calibration().facts(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "version": qbench.__version__,
        "python": platform.python_version(),
        "machine": {finding.what: finding.found for section in examine().values() for finding in section},
        "warnings": warnings,
    }


def _architecture(source: ModelSource) -> dict[str, Any]:
    """What the report says of the model's shape."""
    config = source.config
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    parameters = sum(math.prod(info.shape) for info in source.tensors.values())
    shape = {key.replace("_", " "): config[key] for key in keys if key in config}
    name = (config.get("architectures") or [config["model_type"]])[0]
    return {"parameters": f"{parameters / 1e6:,.1f} M", "architecture": name, **shape}


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
