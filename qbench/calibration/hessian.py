"""What a linear layer's inputs look like over the calibration tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qbench.errors import QbenchError

TINY = torch.finfo(torch.float32).tiny
STRIP = 256  # wide enough for matrix products to run at full speed


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
        for start, stop in self._strips():  # the other half follows from symmetry
            self.total[start:stop, start:].addmm_(flat[:, start:stop].T, flat[:, start:])
        low, high = flat.aminmax()
        self.max_abs = torch.maximum(self.max_abs, torch.maximum(-low, high))
        self.tokens += flat.shape[0]

    def hessian(self, layer: str) -> torch.Tensor:
        """``[in, in]`` float32. Raises `QbenchError` naming `layer` when an activation was NaN or infinite."""
        if not bool(torch.isfinite(self.total).all()):
            raise QbenchError(f"{layer}: its inputs are NaN or infinite on the calibration rows.")
        for start, stop in self._strips():
            self.total[stop:, start:stop] = self.total[start:stop, stop:].T
        return self.total / max(self.tokens, 1)

    def _strips(self) -> Iterator[tuple[int, int]]:
        """Runs of rows whose products with themselves and the rows below make up the upper half of the total."""
        width = len(self.total)
        return ((start, min(start + STRIP, width)) for start in range(0, width, STRIP))


def relative_output_error(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor) -> float:
    """``||X (W - Q)^T||_F / ||X W^T||_F`` from the inputs' ``H = mean(x x^T)``; 0 when both are 0."""
    largest = hessian.diagonal().max().clamp(min=TINY).sqrt()  # weights and inputs of any size stay inside float32
    scale = weight.abs().max().clamp(min=TINY)
    weight, quantized = weight / scale / largest, quantized / scale / largest
    difference = weight - quantized
    error = ((difference @ hessian) * difference).sum(dtype=torch.float64).clamp(min=0)
    signal = ((weight @ hessian) * weight).sum(dtype=torch.float64)
    return float((error / signal).sqrt()) if signal > 0 else 0.0
