"""Measures every preset on the default model and writes the table in recipes/README.md: ``python eval/presets.py RUN``.

RUN is the run's folder; what it already holds is not measured again. ``--set KEY=VALUE`` changes the recipe, as in
``qbench run``; ``--leave-out PRESET`` spares one that takes too long. The table stands between two comments in the
README and is replaced whole.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from result_table import cells, headlines, markdown_table

from qbench.presets import PRESETS
from qbench.resources import data_dir
from qbench.result import Result, read_results

START, END = "<!-- presets: start -->", "<!-- presets: end -->"
COLUMNS = {"bits_per_weight": "{:.2f}", "perplexity": "{:.2f}", "kl_mean": "{:.4f}", "compress_seconds": "{:.0f}"}
HEADINGS = ("preset", "bits / weight", "perplexity", "KL (nats)", "seconds to compress")


def recipe(left_out: Sequence[str] = ()) -> dict[str, object]:
    """One variant a preset, as it is."""
    variants = {name: {"preset": name} for name in PRESETS if name not in left_out}
    base = data_dir("recipes") / "models" / "smollm2-135m.yaml"
    return {"name": "presets", "extends": str(base.resolve()), "variants": variants}


def table(rows: list[Result]) -> str:
    """The README's lines: the reference, then presets by bits and divergence."""
    found = headlines(rows, COLUMNS)

    def place(name: str) -> tuple[float, float]:
        values = found[name]
        return -round(values["bits_per_weight"].value, 1), values["kl_mean"].value if "kl_mean" in values else 0.0

    return "\n".join(
        markdown_table(HEADINGS, 1, ([name, *cells(found[name], COLUMNS)] for name in sorted(found, key=place)))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--leave-out", action="append", default=[], choices=list(PRESETS), metavar="PRESET")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    arguments.run.parent.mkdir(parents=True, exist_ok=True)
    file = arguments.run.parent / "presets.yaml"
    file.write_text(yaml.safe_dump(recipe(arguments.leave_out), sort_keys=False), encoding="utf-8")
    changes = [word for change in arguments.set for word in ("--set", change)]
    subprocess.run(
        [sys.executable, "-m", "qbench", "run", str(file), "--out", str(arguments.run), *changes], check=True
    )
    readme = data_dir("recipes") / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    made = table(read_results(arguments.run / "results.jsonl"))
    readme.write_text(f"{before}{START}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
