"""Every transform on every model family: folding changes nothing, and what is left alone is told with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qbench.compress.engine import compress
from qbench.formats.integer import Integer
from qbench.models.source import open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.transforms.awq import AWQ
from qbench.transforms.base import TRANSFORMS, Transform
from qbench.transforms.smoothquant import SmoothQuant
from tests.compress.test_engine import token_rows
from tests.compress.test_smoothing import folded, smooth
from tests.families import FAMILIES, MORE, logits, make_family

INT4 = Integer(bits=4, group_size=32)


@pytest.mark.parametrize("family", FAMILIES | MORE)
@pytest.mark.parametrize("transform", [TRANSFORMS.get(name)() for name in TRANSFORMS.names()], ids=lambda t: t.name)
def test_folding_changes_no_block_of_any_family(tmp_path: Path, family: str, transform: Transform) -> None:
    source = open_model(make_family(tmp_path, family))
    for block in (0, 1):
        done, difference = smooth(source, transform, block)
        assert difference < 1e-5
        assert done.changed
        prefix = f"model.layers.{block}."
        names = {n.removeprefix(prefix) for n in linear_names(source.tensors, source.config) if n.startswith(prefix)}
        assert names <= set(done.detail)
        for detail in done.detail.values():
            assert detail["name"] == transform.name
        skipped = {name.rpartition(".")[2] for name, detail in done.detail.items() if "skipped" in detail}
        assert skipped == {"o_proj"}  # two query heads read one value head


@pytest.mark.parametrize("transform", [AWQ(grid=5), SmoothQuant()], ids=lambda t: t.name)
def test_router_and_all_experts_are_scaled_against_the_norm(tmp_path: Path, transform: Transform) -> None:
    """Experts that the calibration tokens do not reach read the same norm and must be scaled as well."""
    source = open_model(make_family(tmp_path, "mixtral", num_experts_per_tok=1, num_local_experts=8))
    done, difference = smooth(source, transform)
    assert difference < 1e-5
    moe = "block_sparse_moe"
    assert {f"{moe}.gate.weight", "post_attention_layernorm.weight"} <= done.changed
    for expert in range(8):
        for key in ("w1", "w3"):
            assert f"{moe}.experts.{expert}.{key}.weight" in done.changed
            assert done.detail[f"{moe}.experts.{expert}.{key}"]["folded_into"].endswith("post_attention_layernorm")
    assert folded(done)["w2"] == "w3" if transform.divides_linears else "w2" not in folded(done)


@pytest.mark.trap(13)
@pytest.mark.parametrize("solver", [Nearest(), GPTQ()], ids=lambda solver: solver.name)
def test_an_expert_no_token_reaches_is_scaled_and_rounded(tmp_path: Path, solver: Nearest | GPTQ) -> None:
    """One row of two equal tokens reaches few experts."""
    source = open_model(make_family(tmp_path / "m", "mixtral", num_local_experts=8))
    fine = Scheme(Integer(bits=8, group_size=32), solver, AWQ(grid=5, clip=False))
    schemes = dict.fromkeys(linear_names(source.tensors, source.config), fine)
    done = compress(source, schemes, [[5, 5]], tmp_path / "out", key="k")
    unreached = [layer for layer in done.layers if layer.tokens == 0]
    assert len(unreached) >= 2 * 3 * 4
    for layer in unreached:
        assert layer.transform is not None
        if layer.module.endswith("w2"):
            assert layer.transform == {"name": "awq", "skipped": "no calibration token reached it"}
        else:
            assert "folded_into" in layer.transform
    assert torch.isfinite(logits(done.model, torch.tensor(token_rows(2, 24)))).all()
