"""Odd values in every field of every format, solver, transform, activation format and way of pruning: whatever is not
accepted is refused in one short sentence that names the field's place, and what is accepted can be planned."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench.errors import QbenchError
from qbench.inputs import reference_source
from qbench.presets import AXES
from qbench.recipe import load_recipe
from qbench.validate import check

ODD: list[Any] = [
    *(-1, 0, 1, 7, 33, 10**6, 10**30),
    *(0.5, -0.5, 1e-320, 1e300, math.nan, math.inf, -math.inf),
    *(True, None, "", "4", "x" * 999, [], [1], {}, {"a": 1}, b"x"),
]
FLOAT_ZERO = {"name": "int", "bits": 4, "group_size": 32, "symmetric": False, "zero_point_dtype": "float16"}
MEMBERS = [(axis, name) for axis, registry in AXES.items() for name in registry.names()]


def variant(axis: str, name: str, field: str, value: Any) -> dict[str, Any]:
    """A variant in which only the value of `field` may be wrong."""
    format = FLOAT_ZERO if name == "hqq" else {"name": "int", "bits": 8, "granularity": "channel"}
    if axis == "activation" and name in AXES["format"]:
        format = {"name": name}
    amount = {"pattern": "2:4"} if axis == "prune" and field not in ("pattern", "sparsity") else {}
    return {"format": format} | {axis: {"name": name, field: value} | amount}


@pytest.mark.parametrize(("axis", "name"), MEMBERS, ids=str)
def test_every_field(axis: str, name: str, tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A line of text to calibrate on.\n" * 50)
    rows = {"data": str(text), "rows": 2, "seq_len": 16}
    content = {"model": {"source": str(tiny_llama)}, "calibration": rows, "evaluate": None, "benchmark": None}
    file = tmp_path / "r.yaml"
    for field in fields(AXES[axis].get(name)):
        for value in ODD:
            file.write_text(yaml.safe_dump(content | {"variants": {"v": variant(axis, name, field.name, value)}}))
            try:
                recipe = load_recipe(file)
                check(recipe, reference_source(recipe), out=tmp_path)
            except QbenchError as error:
                lines = str(error).splitlines()
                assert len(lines) <= 3, lines  # the heading, and a line for each width of row at most
                for line in lines[1:]:
                    # a field on its own, or two axes that do not go together
                    assert line.startswith((f"  variants.v.{axis}", "  variants.v (")), line
                    assert len(line) < 500, line
                    assert line.endswith("."), line
