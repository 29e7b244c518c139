"""The data frame of a run: what people look at first comes first."""

from pathlib import Path

from qbench.api import results
from qbench.result import make_results, write_results


def test_columns_are_the_number_then_its_details_then_where_it_is_from(tmp_path: Path) -> None:
    about = {"dtype": "float32", "window": {"seq_len": 8}}
    rows = make_results("reference", [("bits_per_weight", 32, {})], about)
    rows += make_results("a", [("kl_mean", 0.5, {}), ("kl_mean", 0.7, {"confidence": "0-0.25"})], about)
    write_results(tmp_path / "results.jsonl", rows)
    frame = results(tmp_path)
    assert list(frame.columns) == [
        *("variant", "metric", "value", "unit", "detail_confidence"),
        *("provenance_dtype", "provenance_window_seq_len"),
    ]
    whole = frame[(frame.metric == "kl_mean") & frame.detail_confidence.isna()]
    assert whole.set_index("variant").value.to_dict() == {"a": 0.5}
