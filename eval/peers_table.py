"""What a run of `recipes/peers.yaml` found, as a table: ``python eval/peers_table.py RUN eval/baselines/peers.md``.

One line a variant in the recipe's order, which puts ours beside the others' at equal bits. Variants that the run does
not hold are named below the table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from result_table import cells, headlines, markdown_table

from qbench.recipe import load_recipe
from qbench.resources import data_dir
from qbench.result import Result, read_results

COLUMNS = {
    "bits_per_weight": "{:.2f}",
    "kl_mean": "{:.4f}",
    "perplexity": "{:.2f}",
    "top1_agreement": "{:.1%}",
    "calibration_tokens": "{:.0f}",
}
HEADINGS = ("variant", "made by", "bits / weight", "KL (nats)", "perplexity", "same first token", "calibration tokens")


def table(rows: list[Result], variants: list[str]) -> str:
    """The file's text: conditions, the lines of `variants` and of the reference, and what is missing."""
    found = headlines(rows, COLUMNS)
    about = found["reference"]["kl_mean"].provenance
    lines = [
        f"Made by `eval/peers_table.py` from a run of `recipes/peers.yaml` on {about['model']} "
        f"(off its grid: {about['off_grid']}), {about['window']['rows']} windows of {about['window']['seq_len']} "
        f"tokens of {about['data']}, {about['dtype']} on {about['device']}, engine {about['engine']} "
        f"{about['engine_version']}, torch {about['torch_version']}, seed {about['seed']}.",
        "",
    ]

    def line(name: str) -> list[str]:
        made_by = found[name]["kl_mean"].provenance.get("made_by", "qbench" if name != "reference" else "")
        return [name, made_by, *cells(found[name], COLUMNS)]

    lines += markdown_table(HEADINGS, 2, [line(name) for name in ["reference", *variants] if name in found])
    missing = [name for name in variants if name not in found]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    recipe = load_recipe(data_dir("recipes") / "peers.yaml")
    text = table(read_results(arguments.run / "results.jsonl"), list(recipe.variants))
    arguments.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
