"""A compression that is stopped at any block and taken up again ends in the bytes of one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qbench.compress.engine import Compression, compress
from qbench.compress.progress_state import ProgressState
from qbench.formats.base import FORMATS, Format
from qbench.formats.integer import Integer
from qbench.models.compressed import CompressedWriter
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.solvers.signround import SignRound
from qbench.transforms.awq import AWQ
from qbench.transforms.base import Transform
from qbench.transforms.hadamard import Rotated
from qbench.transforms.smoothquant import SmoothQuant
from tests.compress.test_engine import token_rows
from tests.digest import folder_digest
from tests.families import make_family

INT4 = Integer(bits=4, group_size=32, symmetric=False)
ROWS = token_rows(4, 24) + token_rows(3, 17, seed=1)  # batches of two lengths


class Killed(BaseException):
    """What no code of a compression catches."""


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The steps ``"write N"`` and ``"save N"`` (the N-th call of one compression) at which to die, in turn."""
    planned: list[str] = []
    calls = {"write": 0, "save": 0}

    def dying(step: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[step] += bool(planned)
            if planned and planned[0] == f"{step} {calls[step]}":
                planned.pop(0)
                calls.update(write=0, save=0)
                raise Killed
            return method(*args, **kwargs)

        return run

    monkeypatch.setattr(CompressedWriter, "write_shard", dying("write", CompressedWriter.write_shard))
    monkeypatch.setattr(ProgressState, "save", dying("save", ProgressState.save))
    yield planned


def run(source: ModelSource, scheme: Scheme, folder: Path) -> Compression:
    return compress(source, dict.fromkeys(linear_names(source.tensors, source.config), scheme), ROWS, folder, key="k")


@pytest.mark.trap(15)
@pytest.mark.parametrize(
    ("family", "format", "solver", "transform", "rotate"),
    [
        ("llama", INT4, GPTQ(act_order="dynamic"), AWQ(grid=5, form="both"), True),
        ("qwen3", FORMATS.get("nvfp4")(), Nearest(), SmoothQuant(alpha="search"), False),
        ("phi3", INT4, SignRound(iters=5), SmoothQuant(), False),
        ("gemma3_text", INT4, GPTQ(), AWQ(grid=5), True),
        ("mixtral", INT4, GPTQ(), AWQ(grid=5), True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_stopped_runs_end_in_the_same_bytes(
    tmp_path: Path, deaths: list[str], family: str, format: Format, solver: Solver, transform: Transform, rotate: bool
) -> None:
    original = open_model(make_family(tmp_path / "source", family, num_hidden_layers=3, layer_types=None))
    source = Rotated(original, seed=3) if rotate else original
    scheme = Scheme(format, solver, transform)
    whole = run(source, scheme, tmp_path / "whole")
    deaths += ["write 1", "save 2", "write 1"]  # before a block is there; with its file but no progress; once more
    for _ in range(3):
        with pytest.raises(Killed):
            run(source, scheme, tmp_path / "resumed")
        assert not (tmp_path / "resumed").exists()
    resumed = run(source, scheme, tmp_path / "resumed")
    assert folder_digest(tmp_path / "resumed") == folder_digest(tmp_path / "whole")
    assert [asdict(layer) for layer in resumed.layers] == [asdict(layer) for layer in whole.layers]
