"""Transforms on whole blocks of many architectures, in transformers' own code: the function stays, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.compress.block import BlockCompression
from qbench.compress.engine import compress
from qbench.compress.passes import Passes
from qbench.compress.skeleton import Skeleton
from qbench.compress.smoothing import Smoothed, Smoother
from qbench.compress.trace import trace
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import Solver
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.transforms.awq import AWQ
from qbench.transforms.base import Transform
from qbench.transforms.smoothquant import SmoothQuant
from tests.compress.test_engine import state_dict, token_rows, transformers_model
from tests.tiny import byte_tokenizer, make_tiny_llama

INT4 = Integer(bits=4, group_size=32)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, family: str, **overrides: Any) -> ModelSource:
    """A random model whose norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | overrides)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter) if "norm" in name else torch.randn_like(parameter)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return open_model(folder)


@torch.inference_mode()
def smooth(source: ModelSource, transform: Transform, block: int = 0) -> tuple[Smoothed, float]:
    """What was done to one block, and the relative change of what it adds to the hidden states, in float64."""
    skeleton = Skeleton(source, torch.device("cpu"))
    hidden, calls = skeleton.embed([torch.tensor(token_rows(4))])
    name = skeleton.block_name(block)
    schemes = {n: Scheme(INT4, Nearest(), transform) for n in linear_names(source.tensors, source.config)}
    with skeleton.filled(name) as module:
        before = copy.deepcopy(module).double()
        worker = BlockCompression(skeleton, block, module, [calls[0][block]], schemes)
        passes = Passes(skeleton, module, hidden, worker.calls)
        done = Smoother(module, name, worker.schemes, passes).apply(trace(module, lambda: passes.first(1)[1]))
        after = copy.deepcopy(module).double()
        inputs = 3 * torch.randn(2, 48, hidden[0].shape[-1], dtype=torch.float64)  # not what the scales were chosen on
        call = worker.calls[0].rows(slice(2), 4)
        call.kwargs = {key: _double(value) for key, value in call.kwargs.items()}
        outputs = [skeleton.run_block(m, inputs, call) for m in (before, after)]
        difference = torch.linalg.norm(outputs[1] - outputs[0]) / torch.linalg.norm(outputs[0] - inputs)
    return done, float(difference)


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def folded(done: Smoothed) -> dict[str, str]:
    """Linear -> what its scales were folded into, by last names."""
    return {
        name.rpartition(".")[2]: detail["folded_into"].rpartition(".")[2]
        for name, detail in done.detail.items()
        if "folded_into" in detail
    }


NORM_FED = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}
ALL = NORM_FED | {"o_proj": "v_proj", "down_proj": "up_proj"}


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {}, ALL),
        ("llama", {"attention_bias": True, "mlp_bias": True}, ALL),
        ("mistral", {}, ALL),
        ("qwen2", {}, ALL),
        ("qwen3", {}, ALL),
        ("gemma3_text", {}, ALL | dict.fromkeys(("gate_proj", "up_proj"), "pre_feedforward_layernorm")),
        (
            "phi3",
            {},
            {
                "qkv_proj": "input_layernorm",
                "o_proj": "qkv_proj",
                "gate_up_proj": "post_attention_layernorm",
                "down_proj": "gate_up_proj",
            },
        ),
        (
            "stablelm",
            {"use_parallel_residual": True},
            dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "input_layernorm")
            | {"o_proj": "v_proj", "down_proj": "up_proj"},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else str(value)[:12],
)
def test_groups_are_found_and_folding_changes_nothing(
    tmp_path: Path, family: str, overrides: dict[str, Any], expected: dict[str, str]
) -> None:
    done, difference = smooth(make_model(tmp_path / "m", family, **overrides), AWQ(form="both"))
    assert folded(done) == expected
    assert difference < 1e-5
    assert any(detail["form"] != "none" for detail in done.detail.values())


@pytest.mark.trap(7)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_values_shared_by_query_heads_are_left_alone_and_said_so(tmp_path: Path, family: str) -> None:
    source = make_model(
        tmp_path / "m", family, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16
    )
    done, difference = smooth(source, AWQ())
    assert difference < 1e-5
    assert "o_proj" not in folded(done)
    assert "without changing the block's output" in done.detail["self_attn.o_proj"]["skipped"]


def test_smoothquant_scales_only_what_norms_make(tmp_path: Path) -> None:
    done, difference = smooth(make_model(tmp_path / "m", "llama"), SmoothQuant())
    assert folded(done) == NORM_FED
    assert difference < 1e-5
    assert done.detail["mlp.down_proj"] == {"name": "smoothquant"}
    assert done.limits == {}


def test_an_uncompressed_reader_is_scaled_with_the_others(tmp_path: Path) -> None:
    """`v_proj` stays in floating point but reads what the norm now makes."""
    source = make_model(tmp_path / "m", "llama", num_hidden_layers=1)
    names = [name for name in linear_names(source.tensors, source.config) if "v_proj" not in name]
    fine = Integer(bits=8, group_size=32)
    schemes = dict.fromkeys(names, Scheme(fine, Nearest(), SmoothQuant()))
    done = compress(source, schemes, token_rows(), tmp_path / "out", key="k")
    name = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(done.model.load(name), source.load(name))
    assert divergence(source, done.model) < 1e-3


def test_linears_that_share_an_input_must_share_a_transform(tmp_path: Path) -> None:
    source = make_model(tmp_path / "m", "llama", num_hidden_layers=1)
    schemes: dict[str, Scheme] = {}
    for name in linear_names(source.tensors, source.config):
        schemes[name] = Scheme(INT4, Nearest(), AWQ() if "v_proj" in name else SmoothQuant())
    done = compress(source, schemes, token_rows(), tmp_path / "out", key="k")
    details = {layer.module.rpartition(".")[2]: layer.transform for layer in done.layers}
    assert details["q_proj"] == {
        "name": "smoothquant",
        "skipped": "linears that share its input ask for another transform",
    }
    assert details["v_proj"] is not None
    assert details["v_proj"]["name"] == "awq"
    assert "folded_into" in (details["gate_proj"] or {})


@torch.no_grad()
def divergence(source: ModelSource, model: ModelSource) -> float:
    """Mean KL to the reference on rows that calibration has not seen."""
    ids = torch.tensor(token_rows(seed=9))
    folder = Path(str(source.location))
    reference, changed = (
        transformers_model(folder, weights)(ids).logits.log_softmax(-1) for weights in (None, state_dict(model))
    )
    return float((reference.exp() * (reference - changed)).sum(-1).mean())


def with_outliers(folder: Path) -> ModelSource:
    """A llama some of whose channels are much louder than others, as in trained models."""
    model = transformers_model(make_tiny_llama(folder))
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data[::9] *= 20
    model.save_pretrained(folder)
    return open_model(folder)


@pytest.mark.parametrize("solver", [Nearest(), GPTQ()], ids=lambda solver: solver.name)
def test_awq_lowers_the_divergence_under_any_solver(tmp_path: Path, solver: Solver) -> None:
    source = with_outliers(tmp_path / "m")
    found = []
    for transform in (None, AWQ(clip=False)):
        schemes = dict.fromkeys(linear_names(source.tensors, source.config), Scheme(INT4, solver, transform))
        done = compress(source, schemes, token_rows(32), tmp_path / f"out{transform is None}", key="k")
        found.append(divergence(source, done.model))
    assert found[1] < found[0]


@pytest.mark.parametrize("clip", [False, True])
def test_limits_are_those_of_the_weights_that_are_rounded(tmp_path: Path, clip: bool) -> None:
    """Scales folded for down_proj change up_proj's rows: its range is narrowed only after that."""
    source = with_outliers(tmp_path / "m")
    errors = []
    for transform in (None, AWQ(clip=clip)):
        schemes = dict.fromkeys(linear_names(source.tensors, source.config), Scheme(INT4, Nearest(), transform))
        done = compress(source, schemes, token_rows(32), tmp_path / f"out{transform is None}", key="k")
        errors.append({layer.module: layer.relative_error or 0.0 for layer in done.layers})
    for module, before in errors[0].items():
        assert errors[1][module] < 1.3 * before, module


def test_the_changed_norms_are_stored_in_float32_and_everything_else_as_it_was(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    source = open_model(folder)
    schemes = dict.fromkeys(linear_names(source.tensors, source.config), Scheme(INT4, Nearest(), SmoothQuant()))
    done = compress(source, schemes, token_rows(), tmp_path / "out", key="k")
    for name in source.tensors:
        stored = done.model.load(name)
        if "layernorm" in name:
            assert not isinstance(stored, QuantizedTensor)
            assert stored.dtype == torch.float32
        elif "layers" not in name:
            assert not isinstance(stored, QuantizedTensor)
            assert torch.equal(stored, source.load(name))
