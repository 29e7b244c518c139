"""Experts that no calibration token reached: in the results of a run, and on its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qbench.formats.base import QuantizedTensor
from qbench.models.compressed import CompressedModel
from qbench.report.caveats import caveats
from qbench.report.experts import expert_counts
from qbench.report.page import write_report
from qbench.report.run_info import RunInfo
from qbench.report.table import comparison
from qbench.result import make_results, read_results, write_results
from tests.families import make_family
from tests.report.made_up import made_up_run
from tests.test_cli import qbench_


@pytest.mark.trap(13)
def test_a_run_reports_every_experts_tokens(tmp_path: Path) -> None:
    model = make_family(tmp_path / "moe", "mixtral", num_local_experts=16)
    (tmp_path / "few.txt").write_text("few words")
    recipe = tmp_path / "r.yaml"
    content = {
        "model": {"source": str(model)},
        "calibration": {"data": str(tmp_path / "few.txt"), "rows": 1, "seq_len": 4},
        "variants": {
            "solved": {"preset": "gptq", "format": {"group_size": 32}},
            "rounded": {"preset": "rtn", "format": {"group_size": 32}},
        },
        "evaluate": None,
        "benchmark": None,
    }
    recipe.write_text(json.dumps(content))
    assert qbench_("run", recipe, "--out", tmp_path / "out").exit_code == 0
    rows = [row for row in read_results(tmp_path / "out" / "results.jsonl") if row.metric == "expert_tokens"]
    assert {row.variant for row in rows} == {"solved"}  # rounding looks at no token
    assert len(rows) == 2 * 16
    for layer in range(2):
        assert sum(row.value for row in rows if row.detail["layer"] == layer) == 2 * 4
    unreached = [row.detail["module"] for row in rows if row.value == 0]
    assert len(unreached) >= 2 * (16 - 8)
    done = CompressedModel(tmp_path / "out" / "variants" / "solved" / "model")
    weights = [done.load(f"{name}.w1.weight") for name in unreached]
    assert all(isinstance(weight, QuantizedTensor) and weight.dequantize().isfinite().all() for weight in weights)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"no calibration token reached {len(unreached)} of 32 experts" in page
    assert expert_counts(rows, ["solved"])[0].listed in page


def test_the_page_lists_them_by_layer(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path)
    rows = read_results(folder / "results.jsonl")
    counts = {(0, 0): 40, (0, 1): 0, (0, 2): 0, (1, 0): 3, (1, 1): 20, (1, 2): 0}
    measured = [
        ("expert_tokens", float(count), {"layer": layer, "module": f"model.layers.{layer}.mlp.experts.{expert}"})
        for (layer, expert), count in counts.items()
    ]
    rows += make_results("gptq", measured, {})
    write_results(folder / "results.jsonl", rows)
    found = expert_counts(rows, ["reference", "gptq", "nf4"])
    assert [(one.variant, one.least, one.median, one.num_unreached) for one in found] == [("gptq", 0, 1.5, 3)]
    assert found[0].listed == "layer 0: 1, 2; layer 1: 2"
    assert "layer 0: 1, 2; layer 1: 2" in write_report(folder).read_text(encoding="utf-8")
    info, names = RunInfo.read(folder), ["reference", "gptq", "nf4"]
    said = caveats(info, rows, comparison(rows, names, "reference"))
    assert "gptq: no calibration token reached 3 of 6 experts; these had their weights alone." in said
