"""What a run feeds its models: calibration rows, evaluation windows, benchmark prompts; and the reference model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.calibration.data import SELF_GENERATED, TextData, load_data
from qbench.calibration.rows import default_bos, token_rows, token_stream
from qbench.models.source import ModelSource, open_model
from qbench.recipe import Model, Recipe
from qbench.recipe_data import Calibration, Rows
from qbench.resources import sha256_file

if TYPE_CHECKING:
    from qbench.evaluate.windows import Window
    from qbench.scheme import Scheme


def reference_source(recipe: Recipe) -> ModelSource:
    """The model every variant is made from and compared with, permuted off its grid when the recipe says so."""
    from qbench.models.offgrid import OffGrid

    source = open_model(recipe.model.source)
    return OffGrid(source, recipe.seed) if recipe.model.off_grid else source


@dataclass(frozen=True)
class CalibrationRows:
    """Token rows, what they are cut from, and the hash of that text (of the ids, where there was no text)."""

    wanted: Calibration
    token_ids: list[list[int]]
    sha256: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def facts(self) -> dict[str, Any]:
        """Where the rows come from, in plain values."""
        wanted = self.wanted
        found: dict[str, Any] = {"data": wanted.data, "split": wanted.split, "column": wanted.column}
        found["sha256"] = self.sha256
        if wanted.data == SELF_GENERATED:
            found |= {f"sampling_{key}": value for key, value in wanted.sampling.model_dump().items()}
        found |= {"packing": wanted.packing, "seq_len": wanted.seq_len, "imatrix": wanted.imatrix}
        if wanted.imatrix is not None:
            found["imatrix_sha256"] = sha256_file(Path(wanted.imatrix))
        return {key: value for key, value in found.items() if value is not None} | {
            "rows": len(self.token_ids),
            "tokens": self.tokens,
        }

    def provenance(self) -> dict[str, Any]:
        """What a result says of the rows it was calibrated on."""
        facts = self.facts()
        del facts["sha256"]
        return {"data": facts.pop("data"), "data_hash": self.sha256, "calibration": facts}


def calibration_rows(
    source: ModelSource, tokenizer: Any, wanted: Calibration, seed: int, model: Model
) -> CalibrationRows:
    """The rows that are `wanted`; `model` says where and in which dtype the model runs if it writes them itself."""
    if wanted.data == SELF_GENERATED:
        from qbench.self_generated import generated_rows

        rows = generated_rows(source, tokenizer, wanted, seed, model)
        return CalibrationRows(wanted, rows, hashlib.sha256(json.dumps(rows).encode()).hexdigest())
    text = load_data(wanted.data, wanted.split, wanted.column)
    rows = token_rows(text, tokenizer, wanted.rows, wanted.seq_len, wanted.packing)
    return CalibrationRows(wanted, rows, text.sha256)


@dataclass
class Inputs:
    """Token ids of a recipe's calibration and evaluation text, made when first asked for."""

    recipe: Recipe
    source: ModelSource
    _calibrations: dict[str, CalibrationRows] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        from qbench.models.tokenizer import load_tokenizer

        return load_tokenizer(self.source)

    def calibration(self, wanted: Calibration | None = None) -> CalibrationRows:
        """The rows that are `wanted` (the recipe's own, unless a variant has others)."""
        wanted = wanted or self.recipe.calibration
        key = wanted.model_dump_json(exclude={"imatrix"})
        if key not in self._calibrations:
            recipe = self.recipe
            self._calibrations[key] = calibration_rows(self.source, self.tokenizer, wanted, recipe.seed, recipe.model)
        found = self._calibrations[key]
        return CalibrationRows(wanted, found.token_ids, found.sha256)

    @property
    def held_out(self) -> Rows:
        """Where evaluation windows and benchmark prompts are cut from."""
        return self.recipe.evaluate or self.recipe.calibration

    @cached_property
    def evaluation(self) -> TextData:
        return load_data(self.held_out.data, self.held_out.split, self.held_out.column)

    @cached_property
    def evaluation_tokens(self) -> list[int]:
        return token_stream(self.evaluation, self.tokenizer)

    @cached_property
    def bos(self) -> int | None:
        """The id that the tokenizer's own default puts in front of a text, if it does."""
        return default_bos(self.tokenizer)

    @cached_property
    def windows(self) -> list[Window]:
        """At most `evaluate.rows` windows."""
        from qbench.evaluate.windows import windows

        assert self.recipe.evaluate is not None
        wanted = self.recipe.evaluate
        return windows(self.evaluation_tokens, wanted.seq_len, bos=self.bos)[: wanted.rows]

    def warnings(self, variants: Mapping[str, Mapping[str, Scheme]]) -> list[str]:
        """Where the text gives less than the recipe asks for, or than solvers of `variants` (name -> schemes) need.

        Raises `QbenchError` where it gives too little to run.
        """
        from qbench.benchmark.closed_loop import Workload

        if (load := self.recipe.benchmark) is not None:
            Workload(load.requests, load.prompt_tokens, load.output_tokens).prompts(self.evaluation_tokens, 1)
        found: list[str] = []
        hidden = int(self.source.config.get("hidden_size", 0))
        for name, schemes in variants.items():
            wanted = self.recipe.calibration_of(name)
            found += [warning for warning in self._calibration_warnings(wanted) if warning not in found]
            tokens = self.calibration(wanted).tokens
            if tokens < hidden and any(scheme.solver.uses_hessian for scheme in schemes.values()):
                found.append(
                    f"variants.{name}: {tokens} calibration tokens are few for layers of {hidden} inputs; expect a "
                    "weak result."
                )
        if self.recipe.evaluate is not None and len(self.windows) < self.recipe.evaluate.rows:
            asked = self.recipe.evaluate.rows
            found.append(f"evaluate: the text gives {len(self.windows)} windows; {asked} were asked for.")
        return found

    def _calibration_warnings(self, wanted: Calibration) -> list[str]:
        found, rows = [], self.calibration(wanted)
        tokens = rows.tokens
        if wanted.packing == "documents" and len(rows.token_ids) < wanted.rows:
            found.append(f"calibration: {wanted.data} gives {len(rows.token_ids)} rows; {wanted.rows} were asked for.")
        if wanted.packing == "packed" and tokens < wanted.rows * wanted.seq_len:
            found.append(
                f"calibration: {wanted.data} gives {tokens} tokens; {wanted.rows} rows of {wanted.seq_len} were asked "
                "for. All of it is used."
            )
        return found
