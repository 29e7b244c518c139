"""Pruning through the engine, and on to a file and back: zeros stay zeros and the pattern stays the pattern."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.compress.engine import Compression, compress
from qbench.errors import QbenchError
from qbench.export.gptq import read, write
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.hqq import HQQ
from qbench.solvers.nearest import Nearest
from qbench.solvers.signround import SignRound
from qbench.transforms.awq import AWQ
from qbench.transforms.base import Transform
from qbench.transforms.prune import Magnitude, Pruning, Wanda
from tests.compress.test_engine import token_rows


def pruned(
    source: ModelSource, folder: Path, scheme: Scheme, rows: list[list[int]] | None = None
) -> tuple[dict[str, torch.Tensor], Compression]:
    """Decoded linears by module, and what the engine says of them."""
    modules = linear_names(source.tensors, source.config)
    done = compress(source, dict.fromkeys(modules, scheme), rows or token_rows(), folder, key="k")
    return decoded(done.model, modules), done


def decoded(model: ModelSource, modules: list[str]) -> dict[str, torch.Tensor]:
    weights = {}
    for module in modules:
        tensor = model.load(f"{module}.weight")
        assert isinstance(tensor, QuantizedTensor)
        weights[module] = tensor.dequantize()
    return weights


def kept(weight: torch.Tensor, group: int) -> int:
    """The most weights that are not exactly 0 among `group` neighbours."""
    return int((weight != 0).view(-1, group).sum(1).max())


@pytest.mark.trap(24)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "solver", [Nearest(), GPTQ(act_order="none"), GPTQ(), GPTQ(act_order="dynamic"), SignRound(iters=2)], ids=str
)
@pytest.mark.parametrize("transform", [None, AWQ(grid=2)], ids=["plain", "awq"])
def test_2_of_4_survive_quantization_and_the_gptq_file(
    tiny_llama: Path, tmp_path: Path, symmetric: bool, solver: Solver, transform: Transform | None
) -> None:
    source = open_model(tiny_llama)
    scheme = Scheme(Integer(bits=4, group_size=32, symmetric=symmetric), solver, transform, prune=Wanda("2:4"))
    weights, done = pruned(source, tmp_path / "model", scheme)
    write(done.model, tmp_path / "gptq")
    back = decoded(read(str(tmp_path / "gptq")), list(weights))
    for module, weight in weights.items():
        assert kept(weight, 4) <= 2
        assert torch.equal(back[module] == 0, weight == 0)
    for layer in done.layers:
        assert layer.sparsity == float((weights[layer.module] == 0).float().mean())
        assert 0.5 <= layer.sparsity < 0.7


@pytest.mark.parametrize(("prune", "group", "most"), [(Magnitude("1:8"), 8, 1), (Wanda(sparsity=0.75), 64, 16)])
def test_other_patterns(tiny_llama: Path, tmp_path: Path, prune: Pruning, group: int, most: int) -> None:
    scheme = Scheme(Integer(bits=8, granularity="channel"), Nearest(), prune=prune)
    weights, _ = pruned(open_model(tiny_llama), tmp_path / "model", scheme)
    for weight in weights.values():
        width = group if group == 8 else weight.shape[1]  # a share is that of the whole row
        assert kept(weight, width) == most * width // group


def test_inputs_of_later_layers_come_from_pruned_ones_and_decide(tiny_llama: Path, tmp_path: Path) -> None:
    """The mask of the second block's first linears by hand, from a model whose first block is the pruned one."""
    source, rows = open_model(tiny_llama), token_rows()
    weights, _ = pruned(
        source, tmp_path / "model", Scheme(Integer(granularity="channel"), Nearest(), prune=Wanda("2:4"))
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    first = {f"{name}.weight": weight for name, weight in weights.items() if ".layers.0." in name}
    model.load_state_dict(first, strict=False)
    seen: list[torch.Tensor] = []
    module = "model.layers.1.self_attn.q_proj"
    model.get_submodule(module).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor(rows))
    norm = seen[0].flatten(0, 1).double().norm(dim=0)
    original = source.load(f"{module}.weight")
    assert isinstance(original, torch.Tensor)
    scores = (original.double().abs() * norm).view(-1, 4)
    smallest = scores.argsort(1)[:, :2]
    assert bool((weights[module].view(-1, 4).gather(1, smallest) == 0).all())


def test_gptq_wins_back_some_of_what_pruning_costs(tiny_llama: Path, tmp_path: Path) -> None:
    errors = []
    for solver in (Nearest(), GPTQ()):
        scheme = Scheme(Integer(granularity="channel"), solver, prune=Wanda("2:4"))
        _, done = pruned(open_model(tiny_llama), tmp_path / solver.name, scheme, token_rows(64))
        errors.append({layer.module: layer.relative_error or 0.0 for layer in done.layers})
    assert sum(errors[1].values()) < 0.95 * sum(errors[0].values())


def test_hqqs_zero_points_hold_no_zero(tiny_llama: Path, tmp_path: Path) -> None:
    format = Integer(bits=4, group_size=32, symmetric=False, zero_point_dtype="float16")
    with pytest.raises(QbenchError, match=r"layers\.0\..*no exact zero.*int with zero_point_dtype uint8"):
        pruned(open_model(tiny_llama), tmp_path / "model", Scheme(format, HQQ(), prune=Magnitude("2:4")))
