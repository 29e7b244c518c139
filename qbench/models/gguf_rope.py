"""Rotary scaling between Hugging Face's settings and GGUF's.

Llama 3's rule (https://github.com/meta-llama/llama-models, `apply_scaling`) is stored in GGUF not as its four
settings but as the divisor of each frequency, in the tensor ``rope_freqs.weight``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from qbench.errors import QbenchError
from qbench.models.gguf_file import GGUFFile

FACTORS_TENSOR = "rope_freqs.weight"


def llama3_factors(rope: dict[str, Any], theta: float, dimensions: int) -> torch.Tensor:
    """The divisor of every rotary frequency: float32 ``[dimensions / 2]``, `rope` with Llama 3's four settings."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions
    turns = rope["original_max_position_embeddings"] * theta**-exponents / (2 * math.pi)  # over the first context
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(turns < low, float(rope["factor"]), torch.where(turns > high, 1.0, between))
    return factors.float()


def rope_settings(file: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """Transformers' ``rope_parameters`` of a GGUF file. Raises `QbenchError` on a scaling that is not known."""
    path = file.paths[0]
    theta = file.get(f"{architecture}.rope.freq_base", float, 10000.0)
    dimensions = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    if dimensions != head_dim:
        raise QbenchError(f"{path}: rotary embedding of {dimensions} of {head_dim} dimensions cannot be read")
    scaling = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if FACTORS_TENSOR in file.tensors:
        return {"rope_theta": theta, **_llama3_settings(file, architecture, theta, dimensions)}
    if scaling == "linear":
        factor = file.get(f"{architecture}.rope.scaling.factor", float)
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    if scaling != "none":
        raise QbenchError(f"{path}: rope scaling {scaling!r} cannot be read; allowed: none, linear, Llama 3's factors")
    return {"rope_theta": theta, "rope_type": "default"}


def _llama3_settings(file: GGUFFile, architecture: str, theta: float, dimensions: int) -> dict[str, Any]:
    """The four settings whose factors the file holds: the usual ones, verified against every factor."""
    tensor = file.tensors[FACTORS_TENSOR]
    if tensor.type != "F32" or tensor.shape != (dimensions // 2,):
        found = f"{tensor.type} {tensor.shape}"
        raise QbenchError(f"{file.paths[0]}: {FACTORS_TENSOR} is {found}, not F32 ({dimensions // 2},)")
    stored = torch.frombuffer(bytearray(tensor.read()), dtype=torch.float32)
    settings = {
        "rope_type": "llama3",
        "factor": stored.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": file.get(f"{architecture}.rope.scaling.original_context_length", int, 8192),
    }
    if not torch.allclose(llama3_factors(settings, theta, dimensions), stored, rtol=1e-4):
        raise QbenchError(
            f"{file.paths[0]}: {FACTORS_TENSOR} does not follow Llama 3's rule (low 1, high 4, original context "
            f"{settings['original_max_position_embeddings']}); other rope factors cannot be read"
        )
    return settings
