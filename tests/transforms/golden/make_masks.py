"""Writes masks.safetensors: what llm-compressor (0.14) keeps with Wanda and Model Optimizer (0.47) by magnitude.

``pip install llmcompressor==0.14.0.1 nvidia-modelopt==0.47.0``, then run this file.
"""

from pathlib import Path

import torch
from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import accumulate_row_scalars, sparsify_weight
from modelopt.torch.sparsity.weight_sparsity.magnitude import mn_1d_best
from safetensors.torch import save_file

torch.manual_seed(0)
weight = torch.randn(16, 64)
inputs = torch.randn(200, 64) * (1 + 20 * torch.rand(64) ** 6)
linear = torch.nn.Linear(64, 16, bias=False)
linear.weight.data = weight
scalars, _ = accumulate_row_scalars(inputs.view(1, 200, 64), linear, torch.zeros(64), 0)
tensors = {"weight": weight, "inputs": inputs}
for kept, group in ((2, 4), (1, 4), (4, 8)):
    found = sparsify_weight(linear, {linear: scalars}, 0.0, group - kept, group)  # counts what goes
    tensors[f"wanda.{kept}:{group}"] = found != 0
    tensors[f"magnitude.{kept}:{group}"] = mn_1d_best(weight, group, kept).view(16, 64) != 0
for share in (0.5, 0.3):
    tensors[f"wanda.{share}"] = sparsify_weight(linear, {linear: scalars}, share, 0, 0) != 0
save_file(tensors, Path(__file__).with_name("masks.safetensors"))
