"""`qbench report`: the pages of a finished run, made again from its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qbench.commands.common import Json, guarded, print_json, words


@guarded
def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Writes report.html from results.jsonl again and says where it is.

    Examples:

        qbench report runs/quickstart
    """
    from qbench.report.page import write_report

    file = write_report(run)
    words(as_json).print(f"Report: {file}", markup=False, soft_wrap=True)
    if as_json:
        print_json({"report": str(file)})
