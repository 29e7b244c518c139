"""One progress bar for everything that takes more than two seconds: description, count, ETA; on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)


class Task:
    """A running bar: `advance(n)`, and `describe(text)` to say what is being done now."""

    def __init__(self, progress: Progress, description: str, total: float) -> None:
        self._progress = progress
        self._id = progress.add_task(description, total=total)

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._id, amount)

    def describe(self, text: str) -> None:
        self._progress.update(self._id, description=text)


@contextmanager
def progress_bar(description: str, total: float) -> Iterator[Task]:
    """A bar over `total` units of work; gone when the block ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Task(progress, description, total)
