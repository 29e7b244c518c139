"""`qbench methods`: what a recipe can name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import yaml
from rich.table import Table

from qbench.commands.common import Json, guarded, print_json, words

LAYOUT_READERS = {
    "gptq": "a folder for transformers (with gptqmodel) and vLLM",
    "gguf": "one file for llama.cpp and what is built on it",
}
TITLES = {"kv_cache": "KV-cache formats"}
BITS_FOR_WIDTH = 4096  # input columns of the layer for which bits per weight are told


@guarded
def command(as_json: Json = False) -> None:
    """Lists presets, formats, solvers, transforms, ways of pruning, activation and KV-cache formats and export layouts.

    A preset is a format, a solver and perhaps a transform, pruning and an activation format, with every field filled
    in; a recipe may change any of them.

    Examples:

        qbench methods

        qbench methods --json
    """
    found = known_methods()
    if as_json:
        print_json(found)
        return
    out = words(as_json)
    presets = Table("preset", "bits", "what it is, and what a recipe may change", title="Presets")
    for name, preset in found["presets"].items():
        axes = [axis for axis in ("transform", "prune", "format", "solver", "activation") if axis in preset]
        opened = "\n".join(f"  {axis}: {_flow(preset[axis])}" for axis in axes)
        presets.add_row(name, f"{preset['bits_per_weight']:.2f}", f"{preset['description']}\n{opened}")
    out.print(presets)
    for kind in ("formats", "solvers", "transforms", "rotate", "prune", "activations", "kv_cache", "layouts"):
        table = Table("name", "fields", "what", title=TITLES.get(kind, kind.capitalize()))
        for name, entry in found[kind].items():
            options = "\n".join(f"{key}: {value}" for key, value in entry["fields"].items())
            table.add_row(name, options, entry["description"])
        out.print(table)


def known_methods() -> dict[str, dict[str, Any]]:
    """All that a recipe can name, by kind and name, as plain values."""
    from qbench.formats.activation import ACTIVATIONS
    from qbench.formats.base import FORMATS, format_from_dict
    from qbench.formats.kv_cache import KV_FORMATS
    from qbench.formats.size import stored_bytes
    from qbench.presets import PRESETS
    from qbench.solvers.base import SOLVERS
    from qbench.transforms.base import ROTATION, TRANSFORMS
    from qbench.transforms.prune import PRUNERS

    presets = {}
    for name, preset in PRESETS.items():
        nbytes = stored_bytes(format_from_dict(preset["format"]), (BITS_FOR_WIDTH, BITS_FOR_WIDTH))
        presets[name] = {**preset, "bits_per_weight": round(8 * nbytes / BITS_FOR_WIDTH**2, 4)}
    return {
        "presets": presets,
        "formats": {name: _described(FORMATS.get(name)) for name in FORMATS.names()},
        "solvers": {name: _described(SOLVERS.get(name)) for name in SOLVERS.names()},
        "transforms": {name: _described(TRANSFORMS.get(name)) for name in TRANSFORMS.names()},
        "rotate": {"true": {"description": ROTATION, "fields": {}}},
        "prune": {name: _described(PRUNERS.get(name)) for name in PRUNERS.names()},
        "activations": {name: _described(ACTIVATIONS.get(name)) for name in ACTIVATIONS.names()},
        "kv_cache": {name: _described(KV_FORMATS.get(name)) for name in KV_FORMATS.names()},
        "layouts": {name: {"description": text, "fields": {}} for name, text in LAYOUT_READERS.items()},
    }


def _described(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, localns={"torch": Any})
    allowed = {field.name: _allowed(hints[field.name], field.default) for field in fields(cls)}
    return {"description": (cls.__doc__ or "").partition("\n")[0], "fields": allowed}


def _allowed(hint: Any, default: Any) -> str:
    options = [str(option) for option in get_args(hint) if isinstance(option, str)]
    return f"{' | '.join(options)} (default {default})" if options else f"default {default}"


def _flow(mapping: dict[str, Any]) -> str:
    """A mapping as it would be written on one line of a recipe."""
    return yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=1000).strip()
