"""What a linear layer's inputs look like over the calibration tokens."""

from __future__ import annotations

import torch

from qbench.errors import QbenchError


class InputStatistics:
    """The mean of ``x x^T`` over the tokens that reach a linear input, and their number.

    Only rows of tokens are added, never padding, so how tokens were batched makes no difference but rounding.
    """

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.total = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self.max_abs = torch.zeros((), dtype=torch.float32, device=device)  # of any one input
        self.tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations ``[..., in_features]`` of real tokens."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        self.total.addmm_(flat.T, flat)
        low, high = flat.aminmax()
        self.max_abs = torch.maximum(self.max_abs, torch.maximum(-low, high))
        self.tokens += flat.shape[0]

    def hessian(self, layer: str) -> torch.Tensor:
        """``[in, in]`` float32. Raises `QbenchError` naming `layer` when an activation was NaN or infinite."""
        if not bool(torch.isfinite(self.total).all()):
            raise QbenchError(f"{layer}: its inputs are NaN or infinite on the calibration rows.")
        return self.total / max(self.tokens, 1)


def relative_output_error(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor) -> float:
    """``||X (W - Q)^T||_F / ||X W^T||_F`` from the inputs' ``H = mean(x x^T)``; 0 when both are 0."""
    difference = weight - quantized
    error = ((difference @ hessian) * difference).sum(dtype=torch.float64).clamp(min=0)
    signal = ((weight @ hessian) * weight).sum(dtype=torch.float64)
    return float((error / signal).sqrt()) if signal > 0 else 0.0
