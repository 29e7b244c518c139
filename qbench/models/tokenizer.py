"""The tokenizer and the end tokens of any model source, from the files that travel with it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qbench.errors import QbenchError
from qbench.models.json_file import read_json
from qbench.models.source import ModelSource


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """The source's tokenizer, chat template included. Code that came with the model is never run.

    Raises `QbenchError` when the source has no tokenizer files, or none that transformers can read as a fast one.
    """
    with TemporaryDirectory(prefix="qbench-tokenizer-") as name:
        folder = Path(name)
        names = source.write_side_files(folder)
        if not names:
            raise QbenchError(f"{source.location}: no tokenizer files came with this model.")
        config = {key: value for key, value in source.config.items() if key not in ("auto_map", "quantization_config")}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # the tokenizers library raises plain Exception on a malformed tokenizer.json
            reason = " ".join(str(error).split())[:200]
            raise QbenchError(
                f"{source.location}: the tokenizer cannot be read from {', '.join(names)}: {reason}"
            ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise QbenchError(
            f"{source.location}: its tokenizer loads as {type(tokenizer).__name__}; a tokenizer.json is needed."
        )
    tokenizer.name_or_path = source.location
    return tokenizer


def generation_config(source: ModelSource) -> dict[str, Any]:
    """The content of generation_config.json, or an empty dict when the source has none."""
    with TemporaryDirectory(prefix="qbench-generation-") as name:
        source.write_side_files(Path(name))
        path = Path(name) / "generation_config.json"
        return read_json(path) if path.is_file() else {}


def eos_token_ids(source: ModelSource, tokenizer: PreTrainedTokenizerFast | None = None) -> list[int]:
    """Every id that ends a text: those of config.json, generation_config.json (each a number or a list) and of the
    tokenizer (loaded when not given), without repeats, ascending."""
    tokenizer = tokenizer or load_tokenizer(source)
    found: set[int] = set()
    for ids in (
        source.config.get("eos_token_id"),
        generation_config(source).get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(i) is int for i in listed):
            raise QbenchError(f"{source.location}: eos_token_id is {ids!r}, allowed: a token id, or a list of them.")
        found.update(listed)
    return sorted(found)
