"""What a recipe may say of its data, and what a variant changes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.recipe import Recipe, load_recipe
from tests.test_recipe import MODEL, load, refusal, write


def test_a_variant_changes_single_fields_of_the_calibration(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{a: {preset: gptq}, b: {preset: gptq, calibration: {rows: 4}}}", "calibration.seq_len=64")
    assert recipe.calibration_of("a") is recipe.calibration
    changed = recipe.calibration_of("b")
    assert (changed.data, changed.split, changed.rows, changed.seq_len) == ("wiki-paragraphs", "calibration", 4, 64)


@pytest.mark.parametrize(("data", "split"), [("mine.txt", None), ("mixed", "calibration"), ("self-generated", None)])
def test_other_data_does_not_keep_the_old_datas_split(tmp_path: Path, data: str, split: str | None) -> None:
    recipe = load(
        tmp_path,
        f"{{x: {{preset: gptq, calibration: {{data: {data}}}}}}}",
        "calibration={data: own.yaml, split: train, rows: 3}",
    )
    changed = recipe.calibration_of("x")
    assert (changed.data, changed.split, changed.rows) == (data, split, 3)


def test_calibration_survives_the_recipes_own_json(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: gptq, calibration: {data: self-generated}}}", "calibration.packing=documents")
    again = Recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe
    assert again.hash == recipe.hash
    assert again.calibration_of("x") == recipe.calibration_of("x")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("calibration: {data: self-generated, split: train}", "self-generated has no split"),
        ("calibration: {data: self-generated, seq_len: 2}", "needs a seq_len of at least 3; found 2"),
        ("calibration: {data: self-generated, sampling: {temperature: 0}}", "temperature"),
        ("calibration: {sampling: {top_k: 4}}", "sampling is for data self-generated; data is wiki-paragraphs"),
        ("calibration: {packing: padded}", "packing"),
        ("evaluate: {data: self-generated}", "a model is measured on text it did not write"),
    ],
)
def test_refused(tmp_path: Path, section: str, expected: str) -> None:
    assert expected in refusal(tmp_path, MODEL + f"variants: {{x: {{preset: nf4}}}}\n{section}\n")


def test_a_variants_changes_are_checked_with_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path, MODEL + "variants: {x: {preset: nf4, calibration: {data: self-generated, split: a}}}\n")
    with pytest.raises(QbenchError, match=r"variants\.x\.calibration"):
        load_recipe(file)
