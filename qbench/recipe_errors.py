"""Turns pydantic's findings about a recipe into sentences: where (key, file, line), what was found, what is allowed."""

from __future__ import annotations

import reprlib
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from qbench.registry import nearest
from qbench.yaml_tree import KeyPath, Tree, path_text

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlevel = 60, 2


def explain(error: ValidationError, schema: type[BaseModel], tree: Tree, file: str) -> str:
    """One message with a line for each thing that is wrong."""
    lines = [_explain_one(details, schema, tree) for details in error.errors(include_url=False)]
    count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
    return f"{file}: {count}\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))


def _explain_one(details: Any, schema: type[BaseModel], tree: Tree) -> str:
    path: KeyPath = tuple(step for step in details["loc"] if step != "[key]")
    place = tree.place(path)
    where = f"{path_text(path)} ({place})" if place else path_text(path)
    kind, found = details["type"], _SHORT.repr(details["input"])
    if kind == "extra_forbidden":
        known = [field.alias or name for name, field in _model_at(schema, path[:-1]).model_fields.items()]
        return f"{where}: unknown key. {nearest(str(path[-1]), known)}"
    if kind == "missing":
        return f"{where}: is required."
    if kind == "value_error":
        return f"{where}: {str(details['ctx']['error']).rstrip('.')}."
    if kind == "string_pattern_mismatch":
        return f"{where}: found {found}; allowed: text like {details['ctx']['pattern']}."
    if kind == "literal_error":
        return f"{where}: found {found}; allowed: {details['ctx']['expected']}."
    if kind in ("model_type", "dict_type"):
        return f"{where}: found {found}; expected a mapping of keys to values."
    return f"{where}: found {found}; must {details['msg'].partition(' should ')[2] or details['msg']}."


def _model_at(schema: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """The section of the schema that `path` leads to; the free names of a mapping and list positions lead to its
    values' section."""
    model, steps = schema, iter(path)
    for step in steps:
        annotation = model.model_fields[str(step)].annotation
        model = _section_in(annotation) or model
        if get_origin(annotation) in (dict, list):
            next(steps, None)
    return model


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)
