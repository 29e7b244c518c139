import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qbench.compress.engine import compress
from qbench.compress.experts import split_experts
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
COUNTS = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts"}


def random_experts(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **{COUNTS[model_type]: 4})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", COUNTS)
def test_split_experts_compute_what_fused_ones_do(model_type: str) -> None:
    fused = random_experts(model_type)
    split = copy.deepcopy(fused)
    split_experts(split, model_type)
    weights = fused.state_dict()
    for name, expert_weight in split.state_dict().items():
        if ".experts." not in name:
            continue
        path, index, projection, _ = name.replace("block_sparse_moe", "mlp").rsplit(".", 3)
        if projection in ("down_proj", "w2"):
            expert_weight.copy_(weights[f"{path}.down_proj"][int(index)])
        else:
            gate, up = weights[f"{path}.gate_up_proj"][int(index)].chunk(2)
            expert_weight.copy_(gate if projection in ("gate_proj", "w1") else up)
    ids = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        assert torch.allclose(split(ids).logits, fused(ids).logits, atol=1e-5)


@pytest.mark.trap(13)
@pytest.mark.parametrize("model_type", COUNTS)
def test_an_expert_no_token_reaches_is_rounded_from_its_weights_alone(tmp_path: Path, model_type: str) -> None:
    """Two experts a token and four experts: two tokens of one kind leave two experts of each block unreached."""
    random_experts(model_type).save_pretrained(tmp_path / "source")
    source = open_model(tmp_path / "source")
    names = linear_names(source.tensors, source.config)
    experts = [name for name in names if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    schemes = dict.fromkeys(names, Scheme(Integer(bits=4, group_size=16), GPTQ()))
    done = compress(source, schemes, [[5, 5]], tmp_path / "model", key="k")
    reports = {layer.module: layer for layer in done.layers}
    unreached = [name for name in experts if reports[name].tokens == 0]
    assert len(unreached) == 2 * 2 * 3
    for name in experts:
        stored = done.model.load(f"{name}.weight")
        assert isinstance(stored, QuantizedTensor)
        assert stored.format == Integer(bits=4, group_size=16)
        assert torch.isfinite(stored.dequantize()).all()
        assert reports[name].fallback == ("no calibration token reached it" if name in unreached else None)
