"""A library that rounds weights to whole numbers, for tests of the plumbing: a worker and a package of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qbench.peers import base, methods
from qbench.registry import Registry

WORKER = """
import os, signal, sys
from pathlib import Path
from safetensors.torch import load_file
from qbench.peers.tools import Layer
import rounding_library

class Model(dict):
    state_dict = dict.copy

def quantize(work):
    print("rows", work.rows)
    if work.method == "fail":
        raise ValueError("the library cannot do this")
    if work.method == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    model = Model(load_file(Path(work.model) / "model.safetensors"))
    for name in work.modules:
        model[f"{name}.weight"] = rounding_library.round(model[f"{name}.weight"], work.options["blocksize"] / 512)
    return model

def layers(work, model):
    made = {name: model[f"{name}.weight"] for name in work.modules}
    if work.method == "forgets":
        made.pop(work.modules[-1])
    activation = {"name": "fp8", "granularity": "tensor"} if work.method == "inputs-8" else None
    return {
        name: Layer(weight, weight.numel() // 2, activation, 0.5 if activation else None)
        for name, weight in made.items()
    }
"""


NAMES = ("nf4", "inputs-8", "fail", "killed", "forgets")
WAYS = Registry("method of rounding", dict.fromkeys(NAMES, f"{methods.__name__}:BitsAndBytes4Bit"))
ROUNDING = methods.Library("bitsandbytes", "rounding-library", "rounding", WAYS, "nf4")


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "1.2") -> None:
    """Puts the library in the place of bitsandbytes, and its package where only a child process looks."""
    packages = folder / "packages"
    info = packages / f"rounding_library-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rounding-library\nVersion: {version}\n")
    (packages / "rounding_library.py").write_text("def round(w, step): return (w / step).round() * step\n")
    peers = folder / "qbench" / "peers"  # the worker makes `qbench.peers` importable from where it lies
    peers.mkdir(parents=True)
    for name in ("__init__.py", "tools.py", "worker.py"):
        (peers / name).write_bytes((base.WORKER.parent / name).read_bytes())
    (peers / "rounding.py").write_text(WORKER)
    monkeypatch.setattr(base, "WORKER", peers / "worker.py")
    monkeypatch.setitem(methods.PEERS.entries, "bitsandbytes", f"{__name__}:ROUNDING")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("QBENCH_PEER_PYTHON_BITSANDBYTES", str(_interpreter(folder)))


def _interpreter(folder: Path) -> Path:
    """Another path of this interpreter, so that it is asked for its packages rather than this process."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script
