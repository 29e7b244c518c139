"""What every command shares: how errors end, and where words and JSON go."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from qbench.errors import QbenchError, file_message
from qbench.progress import console

Command = TypeVar("Command", bound=Callable[..., Any])
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; everything else goes to stderr.")]

USER_MISTAKE = 2
INTERRUPTED = 130


def guarded(command: Command) -> Command:
    """Ends the command with one message and an exit code on a user's mistake, an unusable file, or Ctrl-C.

    Anything else is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except QbenchError as error:
            _say(str(error))
            raise typer.Exit(USER_MISTAKE) from error
        except OSError as error:
            message = file_message(error)
            if message is None:
                raise
            _say(message)
            raise typer.Exit(USER_MISTAKE) from error
        except KeyboardInterrupt as error:
            _say("Interrupted. What was finished is kept: the same command goes on from there.")
            raise typer.Exit(INTERRUPTED) from error

    return wrapper  # type: ignore[return-value]


def _say(message: str) -> None:
    console.print(message, style="red", markup=False, soft_wrap=True)


def words(as_json: bool) -> Console:
    """Where tables and sentences for people go: stdout, or stderr when JSON is asked for."""
    return console if as_json else Console(highlight=False)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def size(nbytes: float) -> str:
    """``1.5 GiB``: bytes in the largest binary unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
