"""One decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3), driven by an `Architecture`.

Shapes: T tokens of a step, H query heads, K key-value heads, D head_dim. All tokens of a step, whatever request they
are of, go through the projections together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from qbench.kernels.dispatch import Weight, linear
from qbench.runtime.architecture import Architecture
from qbench.runtime.attention import StepPlan, attend
from qbench.runtime.kv_cache import PagedKVCache
from qbench.runtime.rope import inverse_frequencies, rotate, rotation
from qbench.runtime.weights import EMBEDDING, HEAD, embed


class Decoder:
    """Embedding, blocks, final norm and head over loaded `weights` (Hugging Face names)."""

    def __init__(
        self, architecture: Architecture, weights: dict[str, Weight], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.dtype = dtype
        self.inverse_frequencies = inverse_frequencies(architecture.rope, architecture.head_dim).to(device)
        self.kernels: Counter[str] = Counter()

    def hidden_states(self, plan: StepPlan, cache: PagedKVCache) -> torch.Tensor:
        """Final-normed hidden states ``[T, hidden]``; the step's keys and values are left in `cache`."""
        _, hidden = deque(self._layers(plan, cache), maxlen=1).pop()
        return hidden

    def first_broken(self, plan: StepPlan, cache: PagedKVCache) -> str:
        """The first module of a step like `hidden_states` whose output is not finite."""
        return next(name for name, x in self._layers(plan, cache) if not bool(torch.isfinite(x).all()))

    def _layers(self, plan: StepPlan, cache: PagedKVCache) -> Iterator[tuple[str, torch.Tensor]]:
        """The step's hidden states behind the embedding, each block and the final norm, with the module's name."""
        x = embed(self.weights[EMBEDDING], plan.token_ids, self.dtype)
        yield EMBEDDING.removesuffix(".weight"), x
        cos, sin = rotation(plan.positions, self.inverse_frequencies, self.dtype)
        for layer in range(self.architecture.num_layers):
            name = f"model.layers.{layer}"
            x = x + self._attention(layer, self._norm(x, f"{name}.input_layernorm"), cos, sin, plan, cache)
            x = x + self._mlp(f"{name}.mlp.", self._norm(x, f"{name}.post_attention_layernorm"))
            yield name, x
        yield "model.norm", self._norm(x, "model.norm")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of final-normed `hidden` ``[n, hidden]``."""
        return linear(hidden, self.weights[HEAD], ran=self.kernels).float()

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: StepPlan,
        cache: PagedKVCache,
    ) -> torch.Tensor:
        dim, name = self.architecture.head_dim, f"model.layers.{layer}.self_attn."
        q = self._linear(x, f"{name}q_proj").view(len(x), -1, dim)  # [T, H, D]
        k = self._linear(x, f"{name}k_proj").view(len(x), -1, dim)  # [T, K, D]
        v = self._linear(x, f"{name}v_proj").view(len(x), -1, dim)
        if self.architecture.qk_norm:
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        cache.write(layer, plan.slots, rotate(k, cos, sin), v)
        window = self.architecture.windows[layer]
        attended = attend(rotate(q, cos, sin), cache, layer, plan, window, dim**-0.5)
        return self._linear(attended.flatten(1), f"{name}o_proj")

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self._linear(x, f"{prefix}gate_proj"), inplace=True)
        return self._linear(gate.mul_(self._linear(x, f"{prefix}up_proj")), f"{prefix}down_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, torch.Tensor)
        return linear(x, self.weights[f"{name}.weight"], bias, self.kernels)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        assert isinstance(weight, torch.Tensor)
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)
