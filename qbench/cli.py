"""The command line. Each command's arguments and help are in `qbench.commands`."""

from __future__ import annotations

from typing import Annotated

import typer

import qbench
from qbench.commands import doctor, generate, imatrix, inspect, methods, models, report, run, validate

app = typer.Typer(
    name="qbench",
    help="Compress a language model several ways and compare quality, speed and size.",
    epilog="Start with: qbench run recipes/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for module in (run, validate, methods, inspect, models, doctor, generate, imatrix, report):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(qbench.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compress a language model several ways and compare quality, speed and size."""


def main() -> None:
    """The `qbench` command."""
    app()
