"""Plain mappings to frozen dataclasses and back: how formats and solvers are written in recipes and files."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qbench.errors import QbenchError
from qbench.registry import Registry, nearest

LARGEST_INT = 2**31 - 1  # what any size or count fits in
LARGEST_FLOAT = 3.0e38  # what float32 holds


def build(registry: Registry, mapping: dict[str, Any]) -> Any:
    """The registered dataclass that ``{"name": ..., **fields}`` describes.

    Raises `QbenchError` for a missing or unknown name, an unknown field, or a value of the wrong kind.
    """
    given = dict(mapping)
    if "name" not in given:
        raise QbenchError(f"A {registry.kind} needs a name. Known: {', '.join(registry.names())}.")
    name = given.pop("name")
    cls = registry.get(name)
    assert is_dataclass(cls)
    hints = get_type_hints(cls, localns=_type_names())
    known = {field.name for field in fields(cls)}
    for key, value in given.items():
        if key not in known:
            raise QbenchError(f"{registry.kind} {name}: unknown field {reprlib.repr(key)}. {nearest(key, known)}")
        if not _fits(value, hints[key]):
            found, allowed = reprlib.repr(value), _describe(hints[key])
            raise QbenchError(f"{registry.kind} {name}: {key} is {found}; allowed: {allowed}.")
        if isinstance(value, int) and _fits(float(value), hints[key]) and not isinstance(value, bool):
            given[key] = float(value)  # 1 and 1.0 are one value where any number is allowed
    return registry.get(name)(**given)


def _type_names() -> dict[str, Any]:
    return {"torch": Any}


def _fits(value: Any, hint: Any) -> bool:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if options:
        return any(_fits(value, option) for option in options)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(map(str, options))
    if options:
        return " or ".join(_describe(option) for option in options)
    numbers = {int: "a whole number below 2**31", float: "a finite number"}
    names = {**numbers, bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, str(hint))
