"""What the single channels of a tensor look like over the calibration tokens."""

from __future__ import annotations

import torch

from qbench.errors import QbenchError

SAMPLED_TOKENS = 512


class ChannelStatistics:
    """Mean and largest ``|x|`` a channel, in float32, and the activations of tokens taken at equal distances."""

    def __init__(self, channels: int, total_tokens: int, device: torch.device) -> None:
        self.total = torch.zeros(channels, dtype=torch.float32, device=device)
        self.max_abs = torch.zeros(channels, dtype=torch.float32, device=device)
        self.tokens = 0
        self._stride = -(-total_tokens // SAMPLED_TOKENS)
        self._sampled: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations ``[..., channels]`` of real tokens."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        magnitude = flat.abs()
        self.total += magnitude.sum(0)
        self.max_abs = torch.maximum(self.max_abs, magnitude.amax(0))
        self._sampled.append(flat[-self.tokens % self._stride :: self._stride].clone())
        self.tokens += flat.shape[0]

    def mean_abs(self, layer: str) -> torch.Tensor:
        """``[channels]``. Raises `QbenchError` naming `layer` when an activation was NaN or infinite."""
        if not bool(torch.isfinite(self.total).all()):
            raise QbenchError(f"{layer}: its inputs are NaN or infinite on the calibration rows.")
        return self.total / max(self.tokens, 1)

    @property
    def sample(self) -> torch.Tensor:
        """Float32 ``[tokens, channels]``, about `SAMPLED_TOKENS` of them."""
        return torch.cat(self._sampled)
