"""Rounding learned block by block, judged by transformers' forward passes."""

from pathlib import Path

import pytest
import torch

from qbench.compress.block import BlockCompression
from qbench.compress.engine import Compression, compress
from qbench.formats.activation_int8 import Int8Inputs
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.compressed import CompressedWriter
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.solvers.signround import NO_GAIN, SignRound
from qbench.transforms.prune import Wanda
from tests.compress.test_engine import all_linears, state_dict, token_rows, transformers_model
from tests.compress.test_experts import random_experts
from tests.digest import folder_digest
from tests.tiny import make_tiny_llama

INT4 = Integer(bits=4, group_size=32)
LEARNED = SignRound(iters=30, batch_rows=4)


def block_errors(folder: Path, done: Compression, rows: list[list[int]]) -> list[float]:
    """Relative squared distance from the source behind each block, by transformers; the last one normed."""
    with torch.no_grad():
        states = [
            transformers_model(folder, weights)(torch.tensor(rows), output_hidden_states=True).hidden_states
            for weights in (None, state_dict(done.model))
        ]
    return [float((b - a).square().sum() / a.square().sum()) for a, b in zip(*states, strict=True)][1:]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_block_comes_nearer_to_the_source_than_by_plain_rounding(tmp_path: Path, seed: int) -> None:
    folder = make_tiny_llama(tmp_path / "source", seed=seed)
    source, rows = open_model(folder), token_rows(24, 32)
    errors = []
    for solver in (Nearest(), LEARNED):
        done = compress(source, all_linears(source, solver), rows, tmp_path / solver.name, key="k")
        assert {layer.fallback for layer in done.layers} == {None}
        assert {layer.solver for layer in done.layers} == {solver.name}
        errors.append(block_errors(folder, done, rows))
    for plain, learned in zip(*errors, strict=True):
        assert learned < 0.85 * plain


def test_targets_are_those_of_the_uncompressed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path / "source", num_hidden_layers=2)
    seen: list[torch.Tensor] = []
    original = BlockCompression.compress

    def noted(self: BlockCompression, hidden: object, targets: list[torch.Tensor], progress: object) -> object:
        seen.append(torch.cat(targets))
        return original(self, hidden, targets, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockCompression, "compress", noted)
    source, rows = open_model(folder), token_rows(4)
    compress(source, all_linears(source, SignRound(iters=2)), rows, tmp_path / "model", key="k")
    behind: list[torch.Tensor] = []
    model = transformers_model(folder)
    for index in range(2):
        block = model.get_submodule(f"model.layers.{index}")
        block.register_forward_hook(lambda _, args, out: behind.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(torch.tensor(rows))
    for target, expected in zip(seen, behind, strict=True):
        assert torch.allclose(target, expected, atol=1e-4)


def test_without_steps_the_files_are_those_of_plain_rounding(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    plain = compress(source, all_linears(source, Nearest()), token_rows(4), tmp_path / "plain", key="k")
    for solver in (SignRound(iters=0), SignRound(iters=2, lr=0.0)):
        done = compress(source, all_linears(source, solver), token_rows(4), tmp_path / str(solver.iters), key="k")
        assert {layer.fallback for layer in done.layers} == {NO_GAIN}
        for name, tensor in state_dict(done.model).items():
            assert torch.equal(tensor, state_dict(plain.model)[name])


@pytest.mark.trap(15)
def test_a_resumed_run_ends_in_the_same_bytes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(tiny_llama)
    schemes = all_linears(source, SignRound(iters=4, batch_rows=2, seed=3))
    compress(source, schemes, token_rows(6), tmp_path / "whole", key="k")
    write = CompressedWriter.write_shard

    def stopped(self: CompressedWriter, index: int, tensors: object) -> None:
        if index == 1:
            raise KeyboardInterrupt
        write(self, index, tensors)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(CompressedWriter, "write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress(source, schemes, token_rows(6), tmp_path / "resumed", key="k")
    compress(source, schemes, token_rows(6), tmp_path / "resumed", key="k")
    assert folder_digest(tmp_path / "resumed") == folder_digest(tmp_path / "whole")
    other = all_linears(source, SignRound(iters=4, batch_rows=2, seed=4))
    compress(source, other, token_rows(6), tmp_path / "other", key="k")
    assert folder_digest(tmp_path / "other") != folder_digest(tmp_path / "whole")


@pytest.mark.trap(12)
def test_rows_of_different_lengths_are_learned_from(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    rows = token_rows(5, 24) + token_rows(3, 40, seed=1)
    done = compress(
        source, all_linears(source, SignRound(iters=8, lr=0.01, batch_rows=8)), rows, tmp_path / "model", key="k"
    )
    assert {(layer.tokens, layer.fallback) for layer in done.layers} == {(5 * 24 + 3 * 40, None)}


@pytest.mark.trap(13)
def test_an_expert_no_token_reaches_is_rounded_from_its_weights_alone(tmp_path: Path) -> None:
    random_experts("mixtral").save_pretrained(tmp_path / "source")
    source = open_model(tmp_path / "source")
    names = linear_names(source.tensors, source.config)
    format = Integer(bits=4, group_size=16)
    solver = SignRound(iters=8, lr=0.02)
    done = compress(source, dict.fromkeys(names, Scheme(format, solver)), [[5, 5]], tmp_path / "model", key="k")
    unreached = [layer for layer in done.layers if layer.tokens == 0]
    assert len(unreached) == 2 * 2 * 3
    for layer in unreached:
        assert layer.fallback == "no calibration token reached it"
        assert torch.equal(
            decoded(done, layer.module), format.quantize(source_weight(source, layer.module)).dequantize()
        )
    assert all(layer.fallback is None for layer in done.layers if layer.tokens)


def source_weight(source: ModelSource, module: str) -> torch.Tensor:
    weight = source.load(f"{module}.weight")
    assert isinstance(weight, torch.Tensor)
    return weight.float()


def decoded(done: Compression, module: str) -> torch.Tensor:
    stored = done.model.load(f"{module}.weight")
    assert isinstance(stored, QuantizedTensor)
    return stored.dequantize()


def test_solvers_and_settings_may_differ_within_a_block(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    schemes = all_linears(source, LEARNED)
    for name in schemes:
        if "q_proj" in name:
            schemes[name] = Scheme(INT4, GPTQ())
        if "down_proj" in name:
            schemes[name] = Scheme(Integer(bits=3, group_size=32), SignRound(iters=10, lr=0.01, ranges=False))
    done = compress(source, schemes, token_rows(), tmp_path / "model", key="k")
    for layer in done.layers:
        assert (layer.solver, layer.fallback) == (schemes[layer.module].solver.name, None)
        assert layer.format == schemes[layer.module].format.to_dict()


@pytest.mark.trap(24)
def test_pruned_weights_stay_zero_and_inputs_are_rounded_while_learning(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    scheme = Scheme(INT4, SignRound(iters=8), prune=Wanda("2:4"), activation=Int8Inputs())
    names = linear_names(source.tensors, source.config)
    done = compress(source, dict.fromkeys(names, scheme), token_rows(), tmp_path / "model", key="k")
    for name in names:
        assert ((decoded(done, name).view(-1, 4) == 0).sum(1) >= 2).all()
    assert {layer.fallback for layer in done.layers} == {None}


def test_a_head_is_learned_from_the_hessian_of_its_inputs(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    errors = []
    for solver in (Nearest(), SignRound(iters=20, lr=0.01)):
        done = compress(source, {"lm_head": Scheme(INT4, solver)}, token_rows(), tmp_path / solver.name, key="k")
        assert done.layers[0].fallback is None
        errors.append(done.layers[0].relative_error)
    assert errors[0] is not None and errors[1] is not None and errors[1] < errors[0]
