"""The JSON Schema of recipes, for completion and checks in editors."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from qbench.registry import Registry
from qbench.resources import data_dir, written_whole


def open_fields(schema: dict[str, Any], registry: Registry, *more: str) -> None:
    """Makes `schema` an object with the fields of every registered format, solver or transform, each optional.

    `more` are names that are allowed besides those of the registry.
    """
    properties: dict[str, Any] = {"name": {"enum": [*registry.names(), *more]}}
    for name in registry.names():
        for key, field in TypeAdapter(registry.get(name)).json_schema()["properties"].items():
            known = properties.setdefault(key, {"description": "Field of", "anyOf": []})
            known["description"] += f" {name}" if known["description"] == "Field of" else f", {name}"
            allowed = {k: v for k, v in field.items() if k not in ("default", "title")}
            if allowed not in known["anyOf"]:
                known["anyOf"].append(allowed)
    schema.update(type="object", properties=properties, additionalProperties=False)


def name_or_fields(schema: dict[str, Any], registry: Registry, *more: str) -> None:
    """As `open_fields`, or the name alone."""
    whole: dict[str, Any] = {}
    open_fields(whole, registry, *more)
    for key in ("type", "additionalProperties"):
        schema.pop(key, None)
    schema["anyOf"] = [whole["properties"]["name"], whole]


def json_schema() -> str:
    """The schema of a recipe file, as text. Nothing is required in a file: `extends` may supply it."""
    from qbench.recipe import Recipe

    schema = Recipe.model_json_schema()
    del schema["required"]
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def write_schema() -> None:
    """Writes the schema beside the recipes."""
    with written_whole(data_dir("recipes") / "schema.json") as temporary:
        temporary.write_text(json_schema(), encoding="utf-8")


if __name__ == "__main__":
    write_schema()
