"""Masks against llm-compressor's Wanda and Model Optimizer's magnitude pruning, and what cannot be pruned."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qbench.errors import QbenchError
from qbench.transforms.prune import PRUNERS, Magnitude, Pruning, Wanda

GOLDEN = load_file(Path(__file__).parent / "golden" / "masks.safetensors")  # by golden/make_masks.py
JUDGED = [name for name in GOLDEN if "." in name]


@pytest.mark.parametrize("case", JUDGED)
def test_masks_are_those_of_the_judges(case: str) -> None:
    name, _, amount = case.partition(".")
    cls = PRUNERS.get(name)
    pruning: Pruning = cls(pattern=amount) if ":" in amount else cls(sparsity=float(amount))
    mask = pruning.mask(GOLDEN["weight"], GOLDEN["inputs"].square().mean(0))
    assert torch.equal(mask, GOLDEN[case])


def test_wanda_depends_on_the_inputs_and_not_on_scales_folded_into_them() -> None:
    weight, inputs = GOLDEN["weight"], GOLDEN["inputs"]
    mean_square, wanda = inputs.square().mean(0), Wanda("2:4")
    mask = wanda.mask(weight, mean_square)
    assert not torch.equal(mask, Magnitude("2:4").mask(weight, mean_square))
    scales = torch.linspace(0.5, 3, 64)
    assert torch.equal(wanda.mask(weight * scales, (inputs / scales).square().mean(0)), mask)
    assert torch.equal(wanda.mask(weight, None), Magnitude("2:4").mask(weight, None))


@pytest.mark.parametrize(("share", "kept"), [(0.5, 5), (0.39, 7), (0.91, 1)])
def test_a_share_of_each_row_goes_rounded_down(share: float, kept: int) -> None:
    weight = torch.arange(30.0).view(3, 10)
    mask = Magnitude(sparsity=share).mask(weight, None)
    assert mask.sum(1).tolist() == [kept] * 3
    assert bool(mask[:, -kept:].all())


def test_of_equal_scores_the_leftmost_stay() -> None:
    assert Magnitude("2:4").mask(torch.zeros(2, 8), None).tolist() == [[True, True, False, False] * 2] * 2


def test_rows_that_cannot_be_pruned() -> None:
    assert Magnitude("2:4").refusal(64) is None
    assert Magnitude("2:4").refusal(66) == "rows of 66 do not divide into groups of 4, as pattern 2:4 needs"
    assert Magnitude(sparsity=0.01).refusal(64) == "sparsity 0.01 takes no weight from rows of 64"


@pytest.mark.parametrize("pattern", ["4:4", "0:4", "2-4", "2:4:8", "4:2", ":4", "2: 4", "-1:4", "2:99999", ""])
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(QbenchError, match="0 < N < M"):
        Magnitude(pattern)


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5, 7.0, float("nan"), float("inf")])
def test_shares_that_are_none(sparsity: float) -> None:
    with pytest.raises(QbenchError, match="allowed: between 0 and 1"):
        Wanda(sparsity=sparsity)


def test_a_pattern_or_a_share_and_not_both() -> None:
    for fields in ({}, {"pattern": "2:4", "sparsity": 0.5}):
        with pytest.raises(QbenchError, match="one of them"):
            Wanda(**fields)
