"""What a model's config.json and header claim, checked before anything is built or computed from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError

if TYPE_CHECKING:
    from qbench.models.source import ModelSource

LARGEST = {  # far beyond any model there is
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**5,
    "hidden_size": 10**7,
    "intermediate_size": 10**7,
    "vocab_size": 10**8,
    "max_position_embeddings": 10**9,
    "sliding_window": 10**9,
}


def check_sizes(config: Mapping[str, Any], location: str) -> None:
    """Raises one `QbenchError` that lists every size that cannot be one. A size may be absent, null, or a list with
    one a layer; the sizes of a model with several parts are those of its ``text_config``."""
    wrong = []
    for key, largest in LARGEST.items():
        value = config.get(key)
        if key == "sliding_window" and not config.get("use_sliding_window", True):
            continue  # its value then means nothing, and is often 0
        for size in value if isinstance(value, list) else [value]:
            if size is not None and not (type(size) is int and 1 <= size <= largest):
                wrong.append(f"{key} is {size!r}, allowed: a whole number from 1 to {largest}")
                break
    architectures = config.get("architectures")
    if architectures is not None and not (isinstance(architectures, list) and all(_is_text(a) for a in architectures)):
        wrong.append(f"architectures is {architectures!r}, allowed: a list of names")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        if ids is not None and not all(type(i) is int for i in (ids if isinstance(ids, list) else [ids])):
            wrong.append(f"{key} is {ids!r}, allowed: a token id, or a list of them")
    for key in ("model_type", "hidden_act"):
        if config.get(key) is not None and not _is_text(config[key]):
            wrong.append(f"{key} is {config[key]!r}, allowed: a name")
    for key in ("rope_parameters", "rope_scaling", "text_config"):
        if config.get(key) is not None and not isinstance(config[key], dict):
            wrong.append(f"{key} is {config[key]!r}, allowed: an object")
    for key in ("rms_norm_eps", "rope_theta"):
        if key in config and not _is_positive(config[key]):
            wrong.append(f"{key} is {config[key]!r}, allowed: a number above 0")
    if wrong:
        raise QbenchError(f"{location}: config.json: {'; '.join(wrong)}.")
    for key in ("text_config", "rope_parameters"):
        if config.get(key):
            check_sizes(config[key], location)


def check_dtypes(source: ModelSource) -> None:
    """Raises `QbenchError` on a weight stored as bare codes (integers, 8-bit floats): without knowing how they were
    quantized, they are not the weight's values."""
    for name, info in source.tensors.items():
        if name.endswith(".weight") and re.fullmatch(r"BOOL|[IU]\d+|F8_\w+", info.dtype):
            raise QbenchError(
                f"{source.location}: {name} is stored as {info.dtype}, in a quantization that config.json does not "
                "name. Allowed: F64, F32, F16, BF16, GPTQ folders, GGUF files and models made by qbench."
            )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
