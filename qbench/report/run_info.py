"""`run.json`: what a report says about a run beyond its numbers. Written by `qbench.workflow`, read here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ValidationError

from qbench.errors import QbenchError
from qbench.formats.kv_cache import kv_format_from_dict
from qbench.presets import PRESETS
from qbench.report.text import duration, significant
from qbench.result import Result

REFERENCE = "reference"
Facts = dict[str, Any]  # shown as they are, in order; the key is the label


class ExportInfo(BaseModel):
    """An export that was read back: what differs from the variant it was made of (`export.report`)."""

    label: str
    files: list[str]
    nbytes: int
    bits_per_weight: float
    max_abs_difference: float  # over all weights, read back against ours; 0: exact
    worst_tensor: str | None = None
    quantized_max_abs_difference: float  # over the quantized weights alone
    notes: list[str] = []
    warnings: list[str] = []

    @property
    def difference(self) -> str:
        """How what was read back differs, in words; empty when nothing does."""
        if not self.max_abs_difference:
            return ""
        largest = f"{significant(self.max_abs_difference)} ({self.worst_tensor})"
        if self.quantized_max_abs_difference == self.max_abs_difference:
            return f"quantized weights differ by up to {largest}"
        if self.quantized_max_abs_difference:
            smaller = significant(self.quantized_max_abs_difference)
            return f"quantized weights differ by up to {smaller}; others, rounded, by up to {largest}"
        return f"quantized weights exact; others, rounded, differ by up to {largest}"

    @property
    def names(self) -> list[str]:
        return [PurePath(file).name for file in self.files]


class RunInfo(BaseModel):
    """The keys of `run.json` that the report uses.

    `recipe` is the whole recipe as plain values; `architecture`, `calibration` and `machine` are facts to show;
    `started` is ISO 8601; `stage_seconds` and `exports` are by variant. The last three are there when the run is done.
    """

    recipe_name: str
    recipe: dict[str, Any]
    recipe_hash: str
    model: str
    model_revision: str
    off_grid_of: str | None = None
    architecture: Facts = {}
    calibration: Facts = {}
    machine: Facts = {}
    started: str
    warnings: list[str] = []
    seconds: float | None = None
    stage_seconds: dict[str, float] = {}
    exports: dict[str, list[ExportInfo]] = {}

    @classmethod
    def read(cls, run_dir: Path) -> RunInfo:
        """Raises `QbenchError` when the folder is not one of a run, or its `run.json` cannot be understood."""
        path = run_dir / "run.json"
        if not path.is_file():
            raise QbenchError(f"{run_dir} is not the folder of a run: it has no run.json.")
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise QbenchError(f"{path}: {where}: {first['msg']}.") from error

    def variants(self, rows: Sequence[Result]) -> list[str]:
        """The reference and the recipe's variants, in its order, as far as there are `rows` of them."""
        measured = {row.variant for row in rows}
        return [name for name in (REFERENCE, *self.recipe.get("variants", {})) if name in measured]

    def description(self, variant: str) -> str:
        """What the recipe says of a variant, in a few words: "gptq, group size 32"; an unchanged preset's own words."""
        if variant == REFERENCE:
            return "as it came" if self.off_grid_of is None else "channels permuted"
        said = self.recipe["variants"][variant]
        calibration = [
            f"calibration {key.replace('_', ' ')} {value}" for key, value in (said.get("calibration") or {}).items()
        ]
        if peer := dict(said.get("with", {})):
            method = f"{peer.pop('method')} by {peer.pop('library')}"
            options = [f"{key.replace('_', ' ')} {value}" for key, value in peer.items() if key != "python"]
            return ", ".join([method, *options, *calibration])
        preset = said.get("preset")
        fields = [
            str(value) if key == "name" else f"{key.replace('_', ' ')} {value}"
            for axis in ("transform", "prune", "format", "solver", "activation")
            for key, value in said.get(axis, {}).items()
            if (key, value) != ("name", preset)
        ]
        fields += _kv_cache(said.get("kv_cache") or {})
        fields += ["rotated"] * bool(said.get("rotate"))
        fields += [f"{len(said[key])} {key}" for key in ("rules", "ignore") if said.get(key)]
        fields += calibration
        if preset in PRESETS and not fields:
            return str(PRESETS[preset]["description"]).partition(":")[0]
        return ", ".join([preset] * bool(preset) + fields)

    def facts(self) -> dict[str, Facts]:
        """Titled lists for the page's provenance."""
        model = {"source": self.model, "revision": self.model_revision, "off grid of": self.off_grid_of}
        data = {f"calibration {key}": value for key, value in self.calibration.items()}
        data |= {f"evaluation {k}": v for k, v in (self.recipe.get("evaluate") or {}).items() if k != "metrics"}
        time = {name: duration(seconds) for name, seconds in self.stage_seconds.items()}
        if self.seconds is not None:
            time["all"] = duration(self.seconds)
        found = {"Model": model | self.architecture, "Data": data, "Time": time, "Machine": self.machine}
        return {title: {k: v for k, v in facts.items() if v is not None} for title, facts in found.items() if facts}


def _kv_cache(said: dict[str, Any]) -> list[str]:
    """The KV-cache format, and its fields that are not the default's."""
    if said.get("name", "none") == "none":
        return []
    default = kv_format_from_dict({"name": said["name"]}).to_dict()
    changed = [f"{key.replace('_', ' ')} {value}" for key, value in said.items() if value != default[key]]
    return [" ".join(["KV cache", said["name"], *changed])]
