"""Makes signround.safetensors with AutoRound 0.15's own rounding function and optimizer.

One linear's offsets and ranges are tuned for 10 steps on ``tr((Q - W) H (Q - W)^T)``: int4 in groups of 32 with a zero
point (asym) or a signed scale (sym), learning rate 0.02 falling to 0. Stored: weights, Hessian, the error before each
step, the rounded weight of the least error. With a signed scale all groups have their extreme on the negative side:
where a step moves it to the other one, AutoRound's offsets change their direction with the sign of the scale.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD
from auto_round.data_type.int import quant_tensor_asym, quant_tensor_sym
from safetensors.torch import save_file

STEPS, GROUP, RATE = 10, 32, 0.02


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * (1 + 2 * torch.rand(64))
    inputs = 1 + torch.randn(512, 64)  # with a mean, so that errors add up
    hessian = inputs.T @ inputs / len(inputs)
    tensors = {"asym.weight": weight, "sym.weight": weight - 2, "hessian": hessian}
    for kind, function in (("asym", quant_tensor_asym), ("sym", quant_tensor_sym)):
        tensors[f"{kind}.errors"], tensors[f"{kind}.best"] = trajectory(function, tensors[f"{kind}.weight"], hessian)
    save_file({k: v.contiguous() for k, v in tensors.items()}, Path(__file__).with_name("signround.safetensors"))


def trajectory(function: Callable[..., Any], weight: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, ...]:
    blocks = weight.view(-1, GROUP)
    offset = torch.zeros_like(blocks, requires_grad=True)
    low, high = (torch.ones(len(blocks), requires_grad=True) for _ in range(2))
    optimizer = SignSGD([offset, low, high], lr=torch.tensor(RATE))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    errors, best = [], torch.empty(0)
    for _ in range(STEPS):
        with torch.no_grad():
            low.clamp_(0, 1)
            high.clamp_(0, 1)
        quantized, _, _ = function(
            weight,
            bits=4,
            group_size=GROUP,
            v=offset,
            min_scale=low,
            max_scale=high,
            scale_dtype=torch.float32,
            tensor_min=blocks.amin(1).clamp(max=0),
            tensor_max=blocks.amax(1).clamp(min=0),
        )
        difference = quantized - weight
        error = ((difference @ hessian) * difference).sum()
        if not errors or error.item() < min(errors):
            best = quantized.detach().clone()
        errors.append(error.item())
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return torch.tensor(errors), best


if __name__ == "__main__":
    main()
