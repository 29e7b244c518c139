"""The part of validation that is about data: rows that fit the model, files that can be read, chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from qbench.calibration.data import SELF_GENERATED, check_data
from qbench.errors import QbenchError
from qbench.models.json_file import read_json
from qbench.models.source import ModelSource
from qbench.recipe import Recipe
from qbench.recipe_data import Calibration, Rows
from qbench.scheme import Scheme


def check_rows(recipe: Recipe, source: ModelSource, variants: Iterable[str]) -> list[str]:
    """What is wrong with the data that `recipe` feeds the model. Nothing is fetched, and of files little is read."""
    sections: dict[str, Rows] = {"calibration": recipe.calibration}
    if recipe.evaluate is not None:
        sections["evaluate"] = recipe.evaluate
    for name in variants:
        if recipe.variants[name].calibration is not None:
            sections[f"variants.{name}.calibration"] = recipe.calibration_of(name)
    wrong = [sentence for name, rows in sections.items() for sentence in check_section(name, rows, source)]
    if recipe.evaluate is None and recipe.benchmark is not None and recipe.calibration.data == SELF_GENERATED:
        wrong.append(f"benchmark: prompts are cut from evaluate.data; {SELF_GENERATED} text gives none.")
    return wrong


def seen_before(recipe: Recipe, variants: Iterable[str]) -> list[str]:
    """Warnings of variants that are calibrated on the text they are measured on."""
    if recipe.evaluate is None:
        return []
    held_out = (recipe.evaluate.data, recipe.evaluate.split)
    found = []
    for name in variants:
        rows = recipe.calibration_of(name)
        if (rows.data, rows.split) == held_out:
            found.append(
                f"variants.{name}: calibrated on the text it is measured on ({rows.data}); its quality will look "
                "better than it is."
            )
    return found


def check_section(name: str, rows: Rows, source: ModelSource) -> list[str]:
    """What is wrong with one section's data on this model."""
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


def check_importance(
    recipe: Recipe, name: str, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], source: ModelSource
) -> tuple[list[str], list[str]]:
    """What is wrong with the importance matrix of a variant, and what to know of it."""
    path = recipe.calibration_of(name).imatrix
    if path is None:
        return [], []
    where = f"variants.{name}: calibration.imatrix"
    weighing = [module for module, scheme in schemes.items() if scheme.weighs_importance]
    if not weighing:
        return [], [f"{where} has no effect: its solver does not weigh by importance."]
    from qbench.calibration.imatrix import load_imatrix

    try:
        imatrix = load_imatrix(Path(path))
    except QbenchError as error:
        return [f"{where}: {error}"], []
    if recipe.variants[name].rotate or any(schemes[module].transform is not None for module in weighing):
        return [f"{where} is of the model's own inputs; the variant changes them (rotate, transform)."], []
    if imatrix.revision is None and recipe.model.off_grid:
        return [f"{where}: {path} does not say which model it is of, and model.off_grid reorders the inputs. "
                "Allowed: a file of `qbench imatrix --off-grid`, or off_grid: false."], []  # fmt: skip
    if imatrix.revision not in (None, source.revision):
        return [f"{where}: {path} was collected from another model ({imatrix.revision}, not {source.revision})."], []
    missing = [module for module in weighing if (entry := imatrix.entry(module)) is None or entry.tokens == 0]
    found = {module: entry.total.shape[0] for module in weighing if (entry := imatrix.entry(module)) is not None}
    wrong = [
        f"{where}: {path} has {columns} inputs for {module}; it has {shapes[module][1]}."
        for module, columns in found.items()
        if columns != shapes[module][1]
    ]
    if not missing:
        return wrong[:1], []
    return wrong[:1], [f"{where}: no token of {len(missing)} modules ({missing[0]}, ...); they are rounded without it."]


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
