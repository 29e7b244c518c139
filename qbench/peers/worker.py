"""The process a library runs in: ``python -P worker.py JOB.json``, under the interpreter that has the library.

It writes the dense weights and then, whole, the facts; a job without facts has failed, and the traceback on standard
error says why. Standard input stays open as long as the parent lives.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from qbench.peers.tools import Layer, Work

PACKAGE = Path(__file__).parents[1]


def main(job_file: Path) -> None:
    """Runs the job in `job_file` (`qbench.peers.base.PeerJob`)."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    library = import_module(f"qbench.peers.{job['worker']}")
    tools = import_module("qbench.peers.tools")
    work: Work = tools.Work(**job["work"])
    started = time.perf_counter()
    model = library.quantize(work)
    seconds, peak = time.perf_counter() - started, _peak_bytes()
    layers: dict[str, Layer] = library.layers(work, model)
    missing = sorted(set(work.modules) - layers.keys())
    if missing:
        raise RuntimeError(f"{work.library} left {len(missing)} of {len(work.modules)} linears alone ({missing[0]})")
    _write_weights(Path(job["weights"]), model, layers, job["tensors"])
    facts = {
        "library": work.library,
        "version": metadata.version(job["package"]),
        "method": work.method,
        "options": work.options,
        "python": sys.version.split()[0],
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "device": work.device,
        "seconds": seconds,
        "peak_memory_bytes": peak,
        "modules": {name: _layer_facts(layer) for name, layer in sorted(layers.items())},
    }
    _write_whole(Path(job["facts"]), json.dumps(facts, allow_nan=False))


def _layer_facts(layer: Layer) -> dict[str, Any]:
    return {"nbytes": layer.nbytes, "activation": layer.activation, "input_scale": layer.input_scale}


def _write_weights(path: Path, model: nn.Module, layers: dict[str, Layer], names: list[str]) -> None:
    """The tensors `names`: the layers' weights, and all others as the library left them."""
    from safetensors.torch import save_file

    state = model.state_dict()
    tensors = {
        name: layers[name.removesuffix(".weight")].weight if name.removesuffix(".weight") in layers else state[name]
        for name in names
    }
    smoothed = {name: layer.smoothing for name, layer in layers.items() if layer.smoothing is not None}
    tensors |= {f"{name}.smoothing": smoothing.reshape(1, -1) for name, smoothing in smoothed.items()}
    temporary = path.with_name(path.name + ".part")
    save_file({name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in tensors.items()}, temporary)
    temporary.replace(path)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _peak_bytes() -> int:
    """The process's largest resident set."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _name_the_package() -> None:
    """Makes `qbench.peers` importable from where this file lies, without qbench's own dependencies and without putting
    the packages that are installed beside it in this interpreter's way."""
    package = ModuleType("qbench")
    package.__path__ = [str(PACKAGE)]
    sys.modules["qbench"] = package


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _name_the_package()
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some libraries leave threads behind
