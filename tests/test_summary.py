"""The terminal table and the data frame of a run."""

import io
from pathlib import Path

from rich.console import Console

import qbench
from qbench.api import results
from qbench.result import make_results, read_results, write_results
from qbench.summary import print_summary
from tests.report.made_up import HOSTILE, QUALITY, made_up_run


def shown(run: Path, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(run, console)
    return console.export_text()


def test_the_best_of_the_variants_is_marked_not_the_reference(tmp_path: Path) -> None:
    text = shown(made_up_run(tmp_path), 140)
    line = {name: next(x for x in text.splitlines() if x.lstrip().startswith(name)) for name in ("ref", "gptq", "nf4")}
    assert "*30.30 +1.00%" in line["nf4"]
    assert "*4.50" in line["gptq"]
    assert "33.00 +10.00%" in line["gptq"]
    assert "*" not in line["ref"]
    assert "*200" in line["gptq"] and "*200" in line["nf4"]  # equal times to the first token
    assert "! The source was quantized." in text


def test_a_narrow_terminal_gets_two_tables_and_loses_nothing(tmp_path: Path) -> None:
    text = shown(made_up_run(tmp_path), 70)
    assert "…" not in text
    assert sum(line.lstrip().startswith("gptq ") for line in text.splitlines()) == 2


def test_rows_under_other_conditions_are_bracketed(tmp_path: Path) -> None:
    run = made_up_run(tmp_path, second_quality=QUALITY | {"dtype": "bfloat16"})
    text = shown(run, 140)
    assert "(30.30)" in text
    assert "nf4: perplexity was measured with another dtype" in text


def test_zeros_have_a_column_when_something_was_pruned(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    assert "zeros" not in shown(run, 160)
    rows = read_results(run / "results.jsonl")
    write_results(run / "results.jsonl", rows + make_results("gptq", [("sparsity", 0.5125, {})], {}))
    text = shown(run, 160)
    line = next(line for line in text.splitlines() if line.lstrip().startswith("gptq"))
    assert "zeros" in text
    assert "51.25" in line


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    assert HOSTILE in shown(made_up_run(tmp_path, second=HOSTILE), 200)
    assert "[red]x" in shown(made_up_run(tmp_path / "b", second="[red]x"), 200)


def test_data_frame_flattens_detail_and_provenance(tmp_path: Path) -> None:
    frame = results(made_up_run(tmp_path))
    chosen = frame[(frame.variant == "gptq") & (frame.metric == "ttft_s") & (frame.detail_concurrency == 8)]
    assert chosen.value.tolist() == [0.2]
    quality = frame[frame.metric == "perplexity"]
    assert quality.provenance_window_seq_len.tolist() == [512, 512, 512]
    assert quality.provenance_dtype.unique().tolist() == ["float32"]


def test_the_public_name_stays_a_function(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    assert len(qbench.results(run)) == len(qbench.results(run)) > 0
