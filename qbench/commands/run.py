"""`qbench run`: the whole comparison of one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qbench.commands.common import Json, guarded, print_json, words


@guarded
def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's file.", metavar="RECIPE", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. [default: runs/NAME]", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and estimate; load no weights.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="This variant (repeatable) beside the reference.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compresses, exports, measures and compares every variant of a recipe.

    What is finished is kept: a killed run goes on where it was, and a changed recipe redoes only what it changes.

    Examples:

        qbench run recipes/quickstart.yaml

        qbench run recipes/quickstart.yaml --dry-run

        qbench run recipes/quickstart.yaml --only nf4 --set evaluate.rows=4 --out runs/try
    """
    from qbench.recipe import load_recipe

    loaded = load_recipe(recipe, settings or ())
    chosen = loaded.chosen(only)
    folder = out or Path("runs") / loaded.name
    if dry_run:
        from qbench.inputs import reference_source
        from qbench.validate import check

        plan = check(loaded, reference_source(loaded), out=folder, only=chosen)
        plan.print(words(as_json))
        if as_json:
            print_json(plan.to_dict())
        return
    from qbench.workflow import run

    summary = run(loaded, folder, only=chosen)
    summary.print(words(as_json))
    if as_json:
        print_json(summary.to_dict())
