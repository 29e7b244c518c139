"""Models and files of a finished run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from qbench.inputs import reference_source
from qbench.models.source import ModelSource, open_model
from qbench.recipe import Recipe


def recipe_of(run: Path) -> Recipe:
    return Recipe.model_validate(json.loads((run / "run.json").read_text(encoding="utf-8"))["recipe"])


def source_of(run: Path, recipe: Recipe, name: str) -> ModelSource:
    """The reference, or a variant by name."""
    return reference_source(recipe) if name == "reference" else open_model(run / "variants" / name / "model")


def exported_files(run: Path) -> dict[str, Path]:
    """The GGUF file of each variant that has one."""
    return {path.parents[1].name: path for path in sorted(run.glob("variants/*/gguf*/*.gguf"))}
