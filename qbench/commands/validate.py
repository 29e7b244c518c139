"""`qbench validate`: check recipes against their models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qbench.commands.common import USER_MISTAKE, Json, guarded, print_json, words
from qbench.errors import QbenchError


@guarded
def command(
    recipes: Annotated[list[Path], typer.Argument(help="Recipe files.", metavar="RECIPE...", show_default=False)],
    as_json: Json = False,
) -> None:
    """Checks recipes whole: keys, values, patterns against the model's modules, group sizes, memory, disk, time.

    No weights are loaded. All recipes are checked, also after one is refused.

    Examples:

        qbench validate recipes/quickstart.yaml

        qbench validate recipes/*.yaml --json
    """
    from qbench.inputs import reference_source
    from qbench.recipe import load_recipe
    from qbench.validate import check

    out = words(as_json)
    outcome = {}
    for file in recipes:
        try:
            recipe = load_recipe(file)
            plan = check(recipe, reference_source(recipe))
        except QbenchError as error:
            outcome[str(file)] = {"valid": False, "error": str(error)}
            out.print(str(error), style="red", markup=False, soft_wrap=True)
        else:
            outcome[str(file)] = {"valid": True, **plan.to_dict()}
            out.print(f"{file}: valid", markup=False)
            plan.print(out)
    if as_json:
        print_json(outcome)
    if not all(found["valid"] for found in outcome.values()):
        raise typer.Exit(USER_MISTAKE)
