"""Passes that wait at each group of linears: the same bytes as running the block again for each, in one pass."""

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from qbench.compress import held
from qbench.compress.engine import compress
from qbench.compress.skeleton import Skeleton
from qbench.compress.trace import with_siblings
from qbench.errors import QbenchError
from qbench.formats.activation_int8 import Int8Inputs
from qbench.formats.base import Format, QuantizedTensor
from qbench.formats.nvfp4 import NVFP4
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.solvers.signround import SignRound
from tests.compress.test_bad_input import Damaged
from tests.compress.test_engine import INT4, all_linears, token_rows
from tests.compress.test_experts import random_experts
from tests.digest import folder_digest

ROWS = [*token_rows(8, 24), *token_rows(4, 40, seed=1)]


def experts(folder: Path) -> ModelSource:
    random_experts("mixtral").save_pretrained(folder)
    return open_model(folder)


def uniform(source: ModelSource, solver: Solver, format: Format) -> dict[str, Scheme]:
    return dict.fromkeys(linear_names(source.tensors, source.config), Scheme(format, solver))


@pytest.mark.parametrize("kind", ["plain", "activations", "experts"])
def test_same_bytes_as_passes_that_start_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = experts(tmp_path / "source") if kind == "experts" else open_model(tiny_llama)
    activation = Int8Inputs(granularity="tensor") if kind == "activations" else None
    schemes = {
        name: Scheme(INT4, scheme.solver, activation=activation) for name, scheme in all_linears(source, GPTQ()).items()
    }
    rows = [[token % 64 for token in row] for row in ROWS] if kind == "experts" else ROWS
    waiting = compress(source, schemes, rows, tmp_path / "waiting", key="k")
    monkeypatch.setattr(held, "HELD_BYTES", 0)
    again = compress(source, schemes, rows, tmp_path / "again", key="k")
    assert folder_digest(tmp_path / "waiting") == folder_digest(tmp_path / "again")
    assert waiting.layers == again.layers


def test_a_block_runs_once_over_the_rows(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the pass over one row, which shows what reads what."""
    source = open_model(tiny_llama)
    tokens: Counter[int] = Counter()
    run_block = Skeleton.run_block

    def counted(self: Skeleton, block: torch.nn.Module, hidden: torch.Tensor, call: object) -> torch.Tensor:
        tokens[id(block)] += hidden.shape[0] * hidden.shape[1]
        return run_block(self, block, hidden, call)  # type: ignore[arg-type]

    monkeypatch.setattr(Skeleton, "run_block", counted)
    compress(source, all_linears(source, GPTQ()), ROWS, tmp_path / "model", key="k")
    assert set(tokens.values()) == {40 + sum(map(len, ROWS))}


def test_a_refusal_in_the_middle_ends_every_pass(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    schemes = all_linears(source, GPTQ())
    target = "model.layers.1.mlp.gate_proj"
    broken = Damaged(source, f"{target}.weight", float("nan"))
    with pytest.raises(QbenchError, match=target):
        compress(broken, schemes, ROWS, tmp_path / "model", key="k")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("block pass")]


@pytest.mark.trap(28)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("solver", [Nearest(), GPTQ(), SignRound(iters=2)], ids=lambda solver: solver.name)
def test_linears_an_engine_fuses_share_one_nvfp4_scale(
    tiny_llama: Path, tmp_path: Path, solver: Solver, four_over_six: bool
) -> None:
    source = open_model(tiny_llama)
    model = compress(source, uniform(source, solver, NVFP4(four_over_six)), ROWS, tmp_path / "model", key="k").model
    for block in range(3):
        scales = {
            name: model.load(f"model.layers.{block}.{name}_proj.weight").parts["scale_2"]  # type: ignore[union-attr]
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        }
        assert torch.equal(scales["self_attn.q"], scales["self_attn.k"])
        assert torch.equal(scales["self_attn.q"], scales["self_attn.v"])
        assert torch.equal(scales["mlp.gate"], scales["mlp.up"])
        assert len({float(scale) for scale in scales.values()}) == 4


@pytest.mark.trap(28)
@pytest.mark.parametrize("solver", [Nearest(), GPTQ()], ids=str)
def test_experts_reached_or_not_share_a_scale_between_gate_and_up(tmp_path: Path, solver: Solver) -> None:
    """Two tokens of one kind leave two of four experts unreached."""
    source = experts(tmp_path / "source")
    model = compress(source, uniform(source, solver, NVFP4()), [[5, 5]], tmp_path / "model", key="k").model
    for block in range(2):
        for expert in range(4):
            gate, down, up = (
                model.load(f"model.layers.{block}.block_sparse_moe.experts.{expert}.{name}.weight")
                for name in ("w1", "w2", "w3")
            )
            assert isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor)
            assert isinstance(down, QuantizedTensor)
            assert torch.equal(gate.parts["scale_2"], up.parts["scale_2"])
            assert not torch.equal(gate.parts["scale_2"], down.parts["scale_2"])


def test_siblings_have_the_groups_of_traced_ones_and_their_place() -> None:
    traced = [
        ["attn.q", "attn.k"],
        ["mlp.2.gate", "mlp.2.up"],
        ["mlp.2.down"],
        ["mlp.4.gate", "mlp.4.up"],
        ["mlp.4.down"],
    ]
    linears = [f"mlp.{i}.{name}" for i in (0, 2, 3, 4, 10) for name in ("up", "down", "gate")]
    found = with_siblings(traced, ["attn.q", "attn.k", "lonely.7.up", *linears])
    expected = [group for i in (0, 2, 3, 4, 10) for group in ([f"mlp.{i}.gate", f"mlp.{i}.up"], [f"mlp.{i}.down"])]
    assert found == [["attn.q", "attn.k"], *expected]
