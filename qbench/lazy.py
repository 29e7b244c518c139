"""``torch = lazy_import("torch")``: the import happens at the first attribute, so that ``import qbench``,
``--help`` and recipe validation stay fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)  # the next access does not come here
        return found


def lazy_import(name: str) -> Any:
    """A stand-in for module `name` that imports it when first touched."""
    return _LazyModule(name)
