"""The model side of the runtime: weights, cache and decoder behind two calls, `execute` and `logits`."""

from __future__ import annotations

from collections import Counter

import torch

from qbench.errors import QbenchError
from qbench.models.source import ModelSource
from qbench.runtime.architecture import Architecture
from qbench.runtime.attention import StepPlan
from qbench.runtime.decoder import Decoder
from qbench.runtime.kv_cache import PagedKVCache
from qbench.runtime.scheduler import ScheduledStep
from qbench.runtime.weights import load_weights, resident_bytes


class ModelRunner:
    """Runs scheduled steps of one model. Quantized weights stay in their stored form; the rest is cast to `dtype`.

    Keys and values are kept in the format that the source says (`ModelSource.kv_cache`).
    Raises `QbenchError` when the architecture is not supported, or tensors or KV-cache format do not fit the config.
    """

    def __init__(
        self, source: ModelSource, *, dtype: torch.dtype, device: torch.device, num_blocks: int, block_size: int
    ) -> None:
        self.architecture = Architecture.from_config(source.config)
        self.dtype = dtype
        self.device = device
        if source.kv_cache is not None:
            source.kv_cache.check(self.architecture.num_layers, self.architecture.head_dim)
        weights = load_weights(source, self.architecture, dtype, device)
        self.weight_bytes = resident_bytes(weights)
        self.decoder = Decoder(self.architecture, weights, dtype, device)
        self.cache = PagedKVCache(
            num_layers=self.architecture.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.architecture.num_kv_heads,
            head_dim=self.architecture.head_dim,
            dtype=dtype,
            device=device,
            kv_cache=source.kv_cache,
        )

    @property
    def kernels(self) -> Counter[str]:
        """How often each linear kernel ran."""
        return self.decoder.kernels

    @property
    def kv_cache_bytes(self) -> int:
        return self.cache.nbytes

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> torch.Tensor:
        """Final-normed hidden states ``[tokens in step, hidden]``, in the order of the step's requests.

        Raises `QbenchError` naming the layer where they turn NaN or infinite.
        """
        windows = set(self.architecture.windows)
        plan = StepPlan.build(step, self.cache.block_size, windows, self.dtype, self.device)
        hidden = self.decoder.hidden_states(plan, self.cache)
        if not bool(torch.isfinite(hidden).all()):
            raise QbenchError(
                f"{self.decoder.first_broken(plan, self.cache)}: its output is NaN or infinite in {self.dtype}; "
                "its weights or their quantization are broken, or too large for this dtype."
            )
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of `hidden` ``[n, hidden]``; ask only for the rows you need."""
        return self.decoder.logits(hidden)
