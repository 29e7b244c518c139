"""Names to things. A registry's error lists what exists and offers the nearest name."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any


def nearest(name: object, known: Iterable[str]) -> str:
    """A sentence that lists the known names, led by the nearest one when there is one."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name)[:80], names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


class Registry:
    """Maps a name to ``"module:attribute"``; the module is imported when the name is first used."""

    def __init__(self, kind: str, entries: dict[str, str], elsewhere: dict[str, str] | None = None) -> None:
        """`elsewhere` says of names that are looked for here where they are."""
        self.kind = kind
        self.entries = entries
        self.elsewhere = elsewhere or {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def names(self) -> list[str]:
        return sorted(self.entries)

    def get(self, name: object) -> Any:
        from qbench.errors import QbenchError

        if not isinstance(name, str) or name not in self.entries:
            where = self.elsewhere.get(str(name)) or nearest(name, self.entries)
            raise QbenchError(f"Unknown {self.kind} {reprlib.repr(name)}. {where}")
        module, attribute = self.entries[name].split(":")
        return getattr(import_module(module), attribute)
