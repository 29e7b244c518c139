import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.compress.experts import split_experts

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


@pytest.mark.parametrize("model_type", COUNTS)
def test_split_experts_compute_what_fused_ones_do(model_type: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **{COUNTS[model_type]: 4})
    fused = AutoModelForCausalLM.from_config(config).eval()
    split = copy.deepcopy(fused)
    split_experts(split, model_type)
    weights = fused.state_dict()
    for name, expert_weight in split.state_dict().items():
        if ".experts." not in name:
            continue
        path, index, projection, _ = name.rsplit(".", 3)
        if projection in ("down_proj", "w2"):
            expert_weight.copy_(weights[f"{path}.down_proj"][int(index)])
        else:
            gate, up = weights[f"{path}.gate_up_proj"][int(index)].chunk(2)
            expert_weight.copy_(gate if projection in ("gate_proj", "w1") else up)
    ids = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        assert torch.allclose(split(ids).logits, fused(ids).logits, atol=1e-5)
