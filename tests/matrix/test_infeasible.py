"""Combinations that cannot work are refused while the recipe is read, in a sentence that says what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS
from qbench.models.source import open_model
from qbench.recipe import Recipe, load_recipe
from qbench.resolve import replaced, resolve
from qbench.solvers.base import SOLVERS
from tests.families import make_family


def recipe(folder: Path, format: dict[str, Any], solver: dict[str, Any]) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(
        yaml.safe_dump({"model": {"source": "none"}, "variants": {"x": {"format": format, "solver": solver}}})
    )
    return load_recipe(file)


@pytest.mark.parametrize("solver", SOLVERS.names())
@pytest.mark.parametrize("format", FORMATS.names())
def test_a_solver_takes_a_format_or_says_which_it_takes(tmp_path: Path, format: str, solver: str) -> None:
    why = SOLVERS.get(solver)().refusal(FORMATS.get(format)())
    if why is None:
        assert recipe(tmp_path, {"name": format}, {"name": solver}).variants["x"].scheme.format.name == format
        return
    with pytest.raises(QbenchError) as caught:
        recipe(tmp_path, {"name": format}, {"name": solver})
    assert "variants.x" in str(caught.value)
    assert why in str(caught.value)
    assert "allowed: " in why


@pytest.mark.parametrize("format", FORMATS.names())
def test_columns_are_scattered_only_where_a_file_can_say_so(tmp_path: Path, format: str) -> None:
    solver = {"name": "gptq", "act_order": "dynamic"}
    if FORMATS.get(format)().any_order:
        recipe(tmp_path, {"name": format}, solver)
        return
    with pytest.raises(QbenchError, match=f"act_order dynamic .* format {format} cannot store; allowed: none, static"):
        recipe(tmp_path, {"name": format}, solver)


@pytest.mark.parametrize(
    "format", [{"name": "fp8", "granularity": "block"}, {"name": "int", "granularity": "tensor", "group_size": None}]
)
@pytest.mark.parametrize("solver", ["nearest", "gptq"])
def test_ranges_are_searched_only_where_rows_have_their_own(
    tmp_path: Path, format: dict[str, Any], solver: str
) -> None:
    with pytest.raises(QbenchError, match="rows share theirs"):
        recipe(tmp_path, format, {"name": solver, "search": "mse"})


@pytest.mark.trap(37)
@pytest.mark.parametrize(("asked", "given"), [("q4_k", "q5_0"), ("q6_k", "q8_0"), ("q3_k", "q4_0"), ("q2_k", "q4_0")])
def test_rows_that_blocks_do_not_divide_get_another_format_and_it_is_told(
    tmp_path: Path, asked: str, given: str
) -> None:
    source = open_model(make_family(tmp_path, "mixtral"))
    variant = recipe(tmp_path, {"name": asked}, {"name": "gptq"}).variants["x"]
    assert {scheme.format.name for scheme in resolve(variant, source).values()} == {given}
    (sentence,) = replaced(variant, source)
    assert f"are in {given} instead of {asked}, whose blocks do not divide their rows of 64, 128." in sentence
