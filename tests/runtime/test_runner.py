"""Loading (what fits, what is refused, what stays quantized) and independence of a request from its batch."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.codebook import FP4, NF4
from qbench.formats.float8 import FP8
from qbench.formats.integer import Integer
from qbench.formats.mx import MXFP4, MXFP8
from qbench.formats.nvfp4 import NVFP4
from qbench.runtime.scheduler import ScheduledStep
from tests.runtime.fakes import logits_in_chunks, make_runner, random_model, scheduled, source_of
from tests.runtime.test_decoder import TINY, oracle

INT4 = Integer(bits=4, group_size=16)
INT8 = Integer(bits=8, granularity="channel", group_size=None)


def quantize_blocks(name: str, tensor: torch.Tensor) -> torch.Tensor | QuantizedTensor:
    """A mix of formats over the block linears."""
    if tensor.dim() != 2 or ".layers." not in name:
        return tensor
    formats = {"q_proj": INT4, "k_proj": INT8, "v_proj": NF4(), "o_proj": FP8(), "gate_proj": INT8}
    return formats.get(name.split(".")[-2], INT4).quantize(tensor)


def quantize_floats(name: str, tensor: torch.Tensor) -> torch.Tensor | QuantizedTensor:
    """Every floating-point format over the block linears."""
    if tensor.dim() != 2 or ".layers." not in name:
        return tensor
    formats = {
        "q_proj": NVFP4(),
        "k_proj": INT8,
        "v_proj": MXFP4(),
        "o_proj": FP8("block"),
        "gate_proj": MXFP8(),
        "up_proj": FP4(double_quant=True),
    }
    return formats.get(name.split(".")[-2], FP8(element="e5m2")).quantize(tensor)


def quantize_all(name: str, tensor: torch.Tensor) -> torch.Tensor | QuantizedTensor:
    return INT8.quantize(tensor) if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantize", [quantize_blocks, quantize_floats, quantize_all])
def test_quantized_weights_compute_as_their_decoded_values(quantize, tied: bool) -> None:  # type: ignore[no-untyped-def]
    model = random_model(LlamaConfig(**TINY | {"tie_word_embeddings": tied}))
    source = source_of(model, quantize)
    decoded = {k: v.dequantize() if isinstance(v, QuantizedTensor) else v for k, v in source.held.items()}
    model.load_state_dict(decoded, strict=not tied)
    ids = list(range(30))
    runner = make_runner(source)
    found = logits_in_chunks(runner, ids, [20] + [1] * 10, list(range(8)))
    assert (found - oracle(model, ids)).abs().max() < 1e-4
    stored = sum(t.nbytes for t in source.held.values())
    assert stored <= runner.weight_bytes < 1.5 * stored  # tiny rows: the kernels' few bytes a column weigh
    assert runner.kernels["int8_bag_f32"] > 0


def test_kernels_and_bytes_are_reported() -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    runner = make_runner(source, num_blocks=10, block_size=4)
    assert runner.weight_bytes == sum(t.nbytes for t in source.held.values())
    assert runner.kv_cache_bytes == 2 * 2 * 10 * 4 * 2 * 8 * 4  # k+v, layers, blocks, block size, heads, dim, float32
    logits = logits_in_chunks(runner, [1, 2, 3], [3], [0])
    assert logits.shape == (3, 97)
    assert logits.dtype == torch.float32
    assert runner.kernels == {"dense_f32": 2 * 7 + 1}


def test_tensors_that_do_not_fit_are_named() -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    source.held["model.layers.0.extra.weight"] = torch.zeros(1)
    del source.held["model.norm.weight"]
    source.held["lm_head.weight"] = torch.zeros(98, 48)
    with pytest.raises(QbenchError, match=r"missing: model.norm.weight") as caught:
        make_runner(source)
    assert "unexpected: model.layers.0.extra.weight" in str(caught.value)
    assert "lm_head.weight has shape [98, 48], config.json asks for [97, 48]" in str(caught.value)


def test_many_missing_tensors_are_counted() -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    source.held = {"model.norm.weight": source.held["model.norm.weight"]}
    with pytest.raises(QbenchError, match=r"missing: lm_head.weight, .* and 15 more"):
        make_runner(source)


@pytest.mark.trap(5)
@pytest.mark.parametrize("bias", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_bias_that_the_config_does_not_announce_is_refused(bias: str) -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    source.held[f"model.layers.1.{bias}.bias"] = torch.zeros(48)
    with pytest.raises(QbenchError, match=f"unexpected: model.layers.1.{bias}.bias"):
        make_runner(source)


def test_a_tied_head_may_be_stored_twice_but_not_differ() -> None:
    source = source_of(random_model(LlamaConfig(**TINY | {"tie_word_embeddings": True})))
    embedding = source.held["model.embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    source.held["lm_head.weight"] = embedding.clone()
    assert make_runner(source).weight_bytes == sum(t.nbytes for t in source.held.values()) - embedding.nbytes
    source.held["lm_head.weight"] = embedding + 1
    with pytest.raises(QbenchError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        make_runner(source)


@pytest.mark.trap(52)
@pytest.mark.parametrize("quantized", [True, False])
def test_a_request_computes_the_same_alone_and_in_a_mixed_batch(quantized: bool) -> None:
    source = source_of(random_model(LlamaConfig(**TINY)), quantize_blocks if quantized else None)
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 9, 17, 33, 8, 2, 40, 12]
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    alone = [logits_in_chunks(make_runner(source), ids, [len(ids)], list(range(10)))[-1] for ids in prompts]

    runner = make_runner(source, num_blocks=100)
    shuffled = torch.randperm(100, generator=generator).tolist()
    tables = [shuffled[10 * i : 10 * i + 10] for i in range(8)]
    # first all but the last tokens of the even requests, then their last tokens together with the odd requests' all
    runner.execute(ScheduledStep([scheduled(str(i), prompts[i][:-1], 0, tables[i]) for i in range(0, 8, 2)]))
    step = [
        scheduled(str(i), prompts[i][-1:] if i % 2 == 0 else prompts[i], lengths[i] - 1 if i % 2 == 0 else 0, tables[i])
        for i in range(8)
    ]
    hidden = runner.execute(ScheduledStep(step))
    ends = torch.tensor([len(r.token_ids) for r in step]).cumsum(0) - 1
    together = runner.logits(hidden[ends])
    assert (together - torch.stack(alone)).abs().max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_finite_is_named(name: str, value: float) -> None:
    model = random_model(LlamaConfig(**TINY))
    model.get_parameter(name).data.view(-1)[3] = value
    with pytest.raises(QbenchError, match=f"{name} holds NaN or infinite values"):
        make_runner(source_of(model))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.v_proj"])
def test_the_layer_that_overflows_is_named(name: str) -> None:
    model = random_model(LlamaConfig(**TINY))
    model.get_submodule(name).weight.data.mul_(1e38)
    runner = make_runner(source_of(model))
    where = ".".join(name.split(".")[:3])
    with pytest.raises(QbenchError, match=f"{where}: its output is NaN or infinite in torch.float32"):
        runner.execute(ScheduledStep([scheduled("a", [5, 6, 7], 0, [0])]))
