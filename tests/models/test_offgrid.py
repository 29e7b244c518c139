"""The reordered model computes the same (judged by transformers) and has left its grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor, format_from_dict
from qbench.models.offgrid import OffGrid
from qbench.models.source import ModelSource, open_model
from tests.tiny import make_tiny_llama

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


def logits(source: ModelSource, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers' model with the tensors of `source`; norms in `dtype`, not in its fixed float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=dtype)
    model = model.to_empty(device="cpu")
    model.load_state_dict({name: source.load(name) for name in source.tensors}, strict=False)
    model.tie_weights()
    model.model.rotary_emb.__init__(model.config)  # its buffers are no part of the state
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_the_same(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **(sizes | heads | FAMILIES[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    moved = OffGrid(source, seed=1)
    tokens = torch.randint(96, (2, 12))
    reference = logits(source, tokens, torch.float64)
    assert torch.allclose(reference, model(tokens).logits, atol=1e-4)
    assert (logits(moved, tokens, torch.float64) - reference).abs().max() < 1e-9 * reference.abs().max()
    for name in source.tensors:
        before, after = source.load(name), moved.load(name)
        kept = "q_norm" in name or "k_norm" in name or name.endswith(("q_proj.bias", "k_proj.bias"))
        assert torch.equal(before, after) is kept, name  # type: ignore[arg-type]


def block_errors(weight: torch.Tensor) -> torch.Tensor:
    """Relative error of each block of 32 when it is quantized to Q4_1 again, by gguf-py."""
    weight = weight.float()
    kind = gguf.GGMLQuantizationType.Q4_1
    again = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    blocks = weight.reshape(-1, 32)
    return (again.reshape(-1, 32) - blocks).norm(dim=1) / blocks.norm(dim=1)


def test_the_default_model_leaves_its_grid(default_model: ModelSource) -> None:
    assert default_model.grid == "Q4_1"
    moved = OffGrid(default_model, seed=0)
    assert moved.grid is None and moved.off_grid_of == "Q4_1"
    for module in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.3.{module}.weight"
        on, off = block_errors(default_model.load(name)), block_errors(moved.load(name))
        assert (on < 0.01).float().mean() > 0.95, name
        assert (off < 0.01).float().mean() < 0.05, name


def test_the_default_model_computes_the_same(default_model: ModelSource) -> None:
    tokens = torch.arange(100, 116)[None]
    reference = logits(default_model, tokens, torch.float32)
    moved = logits(OffGrid(default_model, seed=0), tokens, torch.float32)
    assert reference.abs().max() > 10
    assert (moved - reference).abs().max() < 1e-3


def test_seed_and_source_are_in_the_revision_and_order_of_loading_does_not_matter(tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    first, again, other = OffGrid(source, 1), OffGrid(source, 1), OffGrid(source, 2)
    assert len({source.revision, first.revision, other.revision}) == 3
    loaded = {name: first.load(name) for name in source.tensors}
    assert all(torch.equal(again.load(name), loaded[name]) for name in reversed(list(loaded)))  # type: ignore[arg-type]
    assert not torch.equal(other.load("lm_head.weight"), loaded["lm_head.weight"])


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"model.layers.0.mlp.experts.0.w1.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    source = open_model(folder)
    with pytest.raises(QbenchError, match=r"experts\.0\.w1"):
        OffGrid(source, 0)
    source.config["model_type"] = "gemma3_text"
    with pytest.raises(QbenchError, match=r"'gemma3_text'.*known: llama"):
        OffGrid(source, 0)


def test_quantized_linears_are_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model(tiny_llama)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = source.load(name)
    assert not isinstance(weight, QuantizedTensor)
    quantized = format_from_dict({"name": "nf4"}).quantize(weight)
    monkeypatch.setattr(source, "load", lambda _: quantized)
    with pytest.raises(QbenchError, match=name):
        OffGrid(source, 0).load(name)
