"""The recipes that ship: each is short, commented, listed, valid, and runs on its model as far as can be known."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from qbench.export.layouts import LAYOUTS
from qbench.inputs import reference_source
from qbench.models.source import ModelSource
from qbench.presets import PRESETS
from qbench.recipe import load_recipe
from qbench.recipe_schema import json_schema
from qbench.resources import data_dir
from qbench.validate import check

FOLDER = data_dir("recipes")
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_would_run(file: Path, default_model: ModelSource) -> None:
    recipe = load_recipe(file)
    assert recipe.model.source == default_model.location
    plan = check(recipe, reference_source(recipe), machine=False)
    assert [warning for warning in plan.warnings if "whose blocks do not divide" not in warning] == []
    assert list(plan.estimates) == ["reference", *recipe.variants]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_short_commented_and_listed(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=schema.json"
    assert lines[1].startswith("# ")
    assert len(lines) <= 40
    row = f"| [{file.stem}]({file.name}) |"
    listed = next(line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(row))
    assert listed.endswith(f"| {len(load_recipe(file).variants)} |")


def test_every_preset_has_a_recipe_of_its_name() -> None:
    assert {file.stem for file in RECIPES} >= PRESETS.keys()


def test_the_quickstart_holds_what_the_demo_shows() -> None:
    recipe = load_recipe(FOLDER / "quickstart.yaml")
    assert list(recipe.variants) == [
        *("absmax-int8", "zeropoint-int8", "fp8", "nvfp4", "nf4"),
        *("rtn-int4-g32", "hqq-int4-g64", "awq-int4-g32", "gptq-int4-g32", "q4_k_m"),
    ]
    assert [export.layout for export in recipe.variants["gptq-int4-g32"].export] == LAYOUTS.names()[::-1]
    assert recipe.model.off_grid
    assert recipe.benchmark is not None
    assert recipe.benchmark.concurrency == [1, 8]


def test_the_json_schema_is_up_to_date() -> None:
    assert (FOLDER / "schema.json").read_text() == json_schema(), "run `make schema`"


def test_the_json_schema_accepts_the_recipes_and_refuses_a_typo() -> None:
    schema = json.loads(json_schema())
    for file in [*RECIPES, *FOLDER.glob("models/*.yaml")]:
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"variants": {"x": {"preset": "gptq", "format": {"bit": 3}}}}, schema)
