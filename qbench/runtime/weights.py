"""A model's tensors, loaded one at a time into the form the kernels want."""

from __future__ import annotations

import torch

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.kernels.dispatch import Weight, prepare
from qbench.models.source import ModelSource
from qbench.runtime.architecture import Architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(
    source: ModelSource, architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    """Every tensor by name; a tied head is the embedding, under both names.

    Raises `QbenchError` naming tensors that are missing, unexpected, of another shape or not finite.
    """
    shapes = architecture.tensor_shapes()
    check_tensors(source, architecture)
    weights = {name: _load(source, name, dtype, device) for name in shapes}
    if architecture.tied_head:
        weights[HEAD] = weights[EMBEDDING]
    return weights


def _load(source: ModelSource, name: str, dtype: torch.dtype, device: torch.device) -> Weight:
    tensor = source.load(name)
    if isinstance(tensor, torch.Tensor) and not bool(torch.isfinite(tensor).all()):
        raise QbenchError(f"{source.location}: {name} holds NaN or infinite values.")
    if name == EMBEDDING and isinstance(tensor, QuantizedTensor):  # rows are looked up, so they stay rows
        parts = {key: part.to(device) for key, part in tensor.parts.items()}
        return QuantizedTensor(tensor.format, tensor.shape, parts)
    if name == EMBEDDING or (isinstance(tensor, torch.Tensor) and tensor.dim() == 1):
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(device, dtype)
    try:
        return prepare(tensor, dtype, device)
    except QbenchError as error:
        raise QbenchError(f"{source.location}: {name}: {error}") from error


def embed(weight: Weight, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the embedding ``[T, hidden]``; of a quantized one, only these rows are decoded."""
    if isinstance(weight, torch.Tensor):
        return weight.index_select(0, token_ids)
    assert isinstance(weight, QuantizedTensor)
    per_row = {key: part for key, part in weight.parts.items() if part.dim() == 2 and part.shape[0] == weight.shape[0]}
    rows = {key: part.index_select(0, token_ids) for key, part in per_row.items()}
    return QuantizedTensor(weight.format, (len(token_ids), weight.shape[1]), weight.parts | rows).dequantize().to(dtype)


def resident_bytes(weights: dict[str, Weight]) -> int:
    """Bytes the weights take in memory, a shared one once."""
    return sum({id(weight): weight.nbytes for weight in weights.values()}.values())


def check_tensors(source: ModelSource, architecture: Architecture) -> None:
    """Raises `QbenchError` naming tensors that are missing, unexpected or of another shape."""
    shapes = architecture.tensor_shapes()
    found = {name: info for name, info in source.tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    problems = []
    if architecture.tied_head and found.pop(HEAD, None) is not None and not _equal(source, EMBEDDING, HEAD):
        problems.append(f"{HEAD} differs from {EMBEDDING}, yet tie_word_embeddings is true")
    for kind, names in (("missing", shapes.keys() - found.keys()), ("unexpected", found.keys() - shapes.keys())):
        if names:
            listed = ", ".join(sorted(names)[:5])
            problems.append(f"{kind}: {listed}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    problems += [
        f"{name} has shape {list(found[name].shape)}, config.json asks for {list(shape)}"
        for name, shape in shapes.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if problems:
        raise QbenchError(f"{source.location}: tensors do not fit config.json: {'; '.join(problems[:5])}.")


def _equal(source: ModelSource, first: str, second: str) -> bool:
    a, b = source.load(first), source.load(second)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
