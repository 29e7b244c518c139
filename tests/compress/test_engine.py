import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.compress.engine import compress
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.digest import folder_digest
from tests.tiny import make_tiny_llama

INT4 = Integer(bits=4, group_size=32)


def token_rows(count: int = 12, length: int = 48, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count, length), generator=generator).tolist()


def all_linears(source: ModelSource, solver: Solver, format: Integer = INT4) -> dict[str, Scheme]:
    return dict.fromkeys(linear_names(source.tensors, source.config), Scheme(format, solver))


def state_dict(model: ModelSource) -> dict[str, torch.Tensor]:
    loaded = {name: model.load(name) for name in model.tensors}
    return {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in loaded.items()}


def transformers_model(folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    return model


def test_reported_errors_are_those_of_transformers_forward(tiny_llama: Path, tmp_path: Path) -> None:
    """Plain rounding: inputs of layer k come from a model whose earlier blocks are rounded."""
    source = open_model(tiny_llama)
    rows = token_rows()
    done = compress(source, all_linears(source, Nearest()), rows, tmp_path / "model", key="k")
    rounded = state_dict(done.model)
    ids = torch.tensor(rows)
    for block in (0, 2):
        name = f"model.layers.{block}.mlp.down_proj"
        earlier = {n: w for n, w in rounded.items() if any(f"layers.{i}." in n for i in range(block))}
        model = transformers_model(tiny_llama, earlier)
        seen: list[torch.Tensor] = []
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(ids)
        inputs = seen[0].flatten(0, 1).double()
        before, after = (weights[f"{name}.weight"].double() for weights in (state_dict(source), rounded))
        expected = torch.linalg.norm(inputs @ (after - before).T) / torch.linalg.norm(inputs @ before.T)
        report = next(layer for layer in done.layers if layer.module == name)
        assert report.relative_error == pytest.approx(float(expected), rel=1e-4)
        assert report.tokens == ids.numel()


def test_gptq_beats_rounding_on_the_models_own_output(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    held_out = torch.tensor(token_rows(seed=9))
    with torch.no_grad():
        reference = transformers_model(tiny_llama)(held_out).logits.log_softmax(-1)
        divergences = []
        for solver in (Nearest(), GPTQ()):
            folder = tmp_path / solver.name
            done = compress(source, all_linears(source, solver), token_rows(64), folder, key="k")
            logits = transformers_model(tiny_llama, state_dict(done.model))(held_out).logits.log_softmax(-1)
            divergences.append(float((reference.exp() * (reference - logits)).sum(-1).mean()))
    assert divergences[1] < 0.95 * divergences[0]  # a random model's inputs are nearly uncorrelated


@pytest.mark.trap(1)
def test_a_recipe_silent_about_the_head_leaves_it_and_the_embedding_alone(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True))
    done = compress(source, all_linears(source, Nearest()), token_rows(), tmp_path / "model", key="k")
    assert done.model.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in done.model.tensors
    name = "model.embed_tokens.weight"
    assert torch.equal(done.model.load(name), source.load(name))


@pytest.mark.trap(1)
@pytest.mark.parametrize("solver", [Nearest(), GPTQ()], ids=lambda solver: solver.name)
def test_quantizing_only_a_tied_head_unties_it(tmp_path: Path, solver: Solver) -> None:
    source = open_model(make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True))
    done = compress(source, {"lm_head": Scheme(INT4, solver)}, token_rows(), tmp_path / "model", key="k")
    assert done.model.config["tie_word_embeddings"] is False
    name = "model.embed_tokens.weight"
    assert torch.equal(done.model.load(name), source.load(name))
    head = done.model.load("lm_head.weight")
    assert isinstance(head, QuantizedTensor)
    assert 0 < done.layers[0].relative_error < 0.2


@pytest.mark.trap(5)
def test_biases_are_kept_bit_for_bit(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        model = transformers_model(folder)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
        model.save_pretrained(folder)
    source = open_model(folder)
    done = compress(source, all_linears(source, GPTQ()), token_rows(), tmp_path / "model", key="k")
    biases = [name for name in source.tensors if name.endswith(".bias")]
    assert len(biases) == 3 * 7
    for name in biases:
        assert torch.equal(done.model.load(name), source.load(name))


@pytest.mark.trap(6)
def test_an_explicit_head_dim(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path / "wide", head_dim=32))
    done = compress(source, all_linears(source, GPTQ()), token_rows(), tmp_path / "model", key="k")
    assert done.model.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)


@pytest.mark.trap(10)
def test_eight_tokens_are_enough_to_finish(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    done = compress(source, all_linears(source, GPTQ()), [list(range(3, 11))], tmp_path / "model", key="k")
    assert {layer.tokens for layer in done.layers} == {8}
    assert all(torch.isfinite(tensor).all() for tensor in state_dict(done.model).values())


@pytest.mark.trap(12)
def test_how_rows_are_batched_makes_no_difference(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three lengths, one by one, and those of equal length together."""
    source = open_model(tiny_llama)
    rows = token_rows(4, 24) + token_rows(4, 40, seed=1) + token_rows(4, 24, seed=2) + token_rows(1, 7, seed=3)
    reports = []
    for tokens in (1, 4096):
        monkeypatch.setattr("qbench.calibration.batches.BATCH_TOKENS", tokens)
        done = compress(source, all_linears(source, Nearest()), rows, tmp_path / str(tokens), key="k")
        reports.append(done.layers)
    for one, other in zip(*reports, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-5)
        assert one.tokens == other.tokens == 8 * 24 + 4 * 40 + 7


def test_mixed_schemes_and_untouched_modules(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    schemes = {
        "model.layers.0.self_attn.v_proj": Scheme(Integer(bits=8, granularity="channel"), Nearest()),
        "model.layers.2.mlp.up_proj": Scheme(INT4, GPTQ()),
    }
    done = compress(source, schemes, token_rows(), tmp_path / "model", key="k")
    stored = {name for name in done.model.tensors if isinstance(done.model.load(name), QuantizedTensor)}
    assert stored == {f"{name}.weight" for name in schemes}
    untouched = set(source.tensors) - stored
    assert all(torch.equal(done.model.load(name), source.load(name)) for name in untouched)


def test_weights_that_are_not_finite_name_the_layer(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "broken")
    model = transformers_model(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] = float("nan")
    model.save_pretrained(folder)
    source = open_model(folder)
    with pytest.raises(QbenchError, match=r"model\.layers\.1\.self_attn\.k_proj"):
        compress(source, all_linears(source, Nearest()), token_rows(), tmp_path / "model", key="k")
    assert not (tmp_path / "model").exists()


KILLED = """
import sys
from pathlib import Path
from tests.compress.test_engine import all_linears, token_rows
from qbench.compress.engine import compress
from qbench.models.source import open_model
from qbench.solvers.gptq import GPTQ
source = open_model(sys.argv[1])
compress(source, all_linears(source, GPTQ(act_order="dynamic")), token_rows(), Path(sys.argv[2]), key="k")
"""


@pytest.mark.trap(15)
def test_killed_runs_end_in_the_same_bytes(tmp_path: Path) -> None:
    source_folder = make_tiny_llama(tmp_path / "source", num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    command = [sys.executable, "-c", KILLED, str(source_folder)]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=os.environ)
    killed = 0
    progress = tmp_path / "resumed.part" / "progress"
    for blocks in (1, 4, 9):
        child = subprocess.Popen([*command, str(tmp_path / "resumed")], env=os.environ)
        while child.poll() is None and not any(progress.glob(f"hidden-{blocks:05d}*")):
            time.sleep(0.001)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
    subprocess.run([*command, str(tmp_path / "resumed")], check=True, env=os.environ)
    assert killed == 3
    assert folder_digest(tmp_path / "resumed") == folder_digest(tmp_path / "whole")


MEASURED = """
import resource, sys
from pathlib import Path
from tests.compress.test_engine import all_linears, token_rows
from qbench.compress.engine import compress
from qbench.models.source import open_model
from qbench.solvers.gptq import GPTQ
source = open_model(sys.argv[1])
schemes = all_linears(source, GPTQ())
compress(source, {k: v for k, v in schemes.items() if ".layers.0." in k}, token_rows(8, 128), Path(sys.argv[2] + "-warm"), key="k")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
compress(source, schemes, token_rows(16, 256), Path(sys.argv[2]), key="k")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""  # noqa: E501


@pytest.mark.trap(14)
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """Kibibytes above a warm process, for 4 and 16 blocks of 3.3 MiB each."""
    grown = []
    for depth in (4, 16):
        folder = make_tiny_llama(
            tmp_path / f"deep{depth}",
            num_hidden_layers=depth,
            hidden_size=256,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        command = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / f"out{depth}")]
        found = subprocess.run(command, check=True, env=os.environ, capture_output=True, text=True)
        grown.append(int(found.stdout.split()[-1]))
    block = 4 * (4 * 256**2 + 3 * 256 * 768) // 1024
    assert grown[1] - grown[0] < 4 * block  # twelve more blocks
