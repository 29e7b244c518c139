"""Writing a safetensors file, whole or not at all, tensor by tensor (https://github.com/huggingface/safetensors#format).

The bytes depend on nothing but the arguments, and what the operating system refuses is an OSError that names the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.lazy import lazy_import
from qbench.models.safetensors_file import DTYPES
from qbench.resources import written_whole

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes `tensors` to `path`: the widest dtypes first, so that each tensor is aligned, then by name."""
    names = {torch_name: name for name, (_, torch_name) in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
