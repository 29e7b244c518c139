"""The part of validation that is about data: rows that fit the model, files that can be read, chat templates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from qbench.calibration.data import SELF_GENERATED, check_data
from qbench.errors import QbenchError
from qbench.models.json_file import read_json
from qbench.models.source import ModelSource
from qbench.recipe import Recipe
from qbench.recipe_data import Calibration, Rows


def check_rows(recipe: Recipe, source: ModelSource, variants: Iterable[str]) -> list[str]:
    """What is wrong with the data that `recipe` feeds the model. Nothing is fetched, and of files little is read."""
    sections: dict[str, Rows] = {"calibration": recipe.calibration}
    if recipe.evaluate is not None:
        sections["evaluate"] = recipe.evaluate
    for name in variants:
        if recipe.variants[name].calibration is not None:
            sections[f"variants.{name}.calibration"] = recipe.calibration_of(name)
    wrong = [sentence for name, rows in sections.items() for sentence in _check(name, rows, source)]
    if recipe.evaluate is None and recipe.benchmark is not None and recipe.calibration.data == SELF_GENERATED:
        wrong.append(f"benchmark: prompts are cut from evaluate.data; {SELF_GENERATED} text gives none.")
    return wrong


def _check(name: str, rows: Rows, source: ModelSource) -> list[str]:
    wrong = []
    limit = source.config.get("max_position_embeddings")
    if limit is not None and rows.seq_len > limit:
        wrong.append(f"{name}.seq_len is {rows.seq_len}; the model's positions end at {limit}.")
    if isinstance(rows, Calibration) and rows.data == SELF_GENERATED:
        return wrong + _not_runnable(name, source)
    try:
        if check_data(rows.data, rows.split, rows.column) and not _has_chat_template(source):
            wrong.append(f"{name}: data {rows.data} holds conversations; the model has no chat template.")
    except QbenchError as error:
        wrong.append(f"{name}: {error}")
    return wrong


def _not_runnable(name: str, source: ModelSource) -> list[str]:
    """Why the built-in runtime cannot write text with the model, if it cannot."""
    from qbench.runtime.architecture import Architecture
    from qbench.runtime.weights import check_tensors

    try:
        check_tensors(source, Architecture.from_config(source.config))
    except QbenchError as error:
        return [f"{name}: the model cannot write its own text: {error}"]
    return []


def _has_chat_template(source: ModelSource) -> bool:
    with TemporaryDirectory(prefix="qbench-template-") as folder:
        names = source.write_side_files(Path(folder))
        config = Path(folder) / "tokenizer_config.json"
        in_config = config.is_file() and read_json(config).get("chat_template") is not None
    return in_config or any("chat_template" in name for name in names)
