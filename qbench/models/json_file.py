"""JSON files that came with a model: read with a bound on their size, and with a message that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qbench.errors import QbenchError

MAX_BYTES = 256 * 2**20  # a tokenizer.json with a vocabulary of 256k tokens takes about 35 MB


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `QbenchError` when it cannot be read, is too large, or is not a JSON object."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise QbenchError(f"{path}: {size} bytes is too large for a JSON file of a model (at most {MAX_BYTES}).")
        value = json.loads(path.read_bytes(), object_pairs_hook=unique_pairs)
    except OSError as error:
        raise QbenchError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise QbenchError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise QbenchError(f"{path}: holds a JSON {type(value).__name__}, expected an object.")
    return value


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses duplicate keys (ValueError)."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r} appears twice")
    return found
