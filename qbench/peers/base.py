"""Running another library in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import QbenchError
from qbench.models.json_file import read_json
from qbench.peers.choice import Choice
from qbench.progress import progress_bar
from qbench.resources import written_whole

WORKER = Path(__file__).with_name("worker.py")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # some libraries take one that they were not given


@dataclass(frozen=True)
class PeerJob:
    """One run of a library. Every path is absolute; `model` is a Hugging Face folder of floats."""

    choice: Choice
    model: Path
    tensors: list[str]  # the names of all the model's weights
    modules: list[str]  # the linears to quantize
    rows: list[list[int]]
    device: str
    seed: int

    def run(self, folder: Path, label: str) -> dict[str, Any]:
        """Runs the library; `folder` then holds ``weights.safetensors``, and ``log.txt`` with what the library said.

        Returns its facts: version, seconds and peak bytes of its run (imports count for memory, not for time), and for
        each module the bytes it takes and its activation format. Raises `QbenchError` when the process fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        facts = folder / "facts.json"
        facts.unlink(missing_ok=True)
        content = {
            "worker": self.choice.library.worker,
            "package": self.choice.library.package,
            "weights": str(folder / "weights.safetensors"),
            "facts": str(facts),
            "tensors": self.tensors,
            "work": {
                "library": self.choice.library.name,
                "method": self.choice.method,
                "options": self.choice.options,
                "model": str(self.model),
                "modules": self.modules,
                "rows": self.rows,
                "device": self.device,
                "seed": self.seed,
            },
        }
        with written_whole(folder / "job.json") as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
        with progress_bar(label, 1):
            self._run(folder)
        return read_json(facts)

    def _run(self, folder: Path) -> None:
        command = [self.choice.interpreter, "-P", str(WORKER), str(folder / "job.json")]
        log = folder / "log.txt"
        # A process group of its own: Ctrl-C is for the parent, which then ends the child.
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=os.environ | QUIET | (NO_GPU if self.device == "cpu" else {}),
                cwd=folder,
            ) as child,
        ):
            try:
                code = child.wait()
            except BaseException:
                child.kill()
                raise
        name = self.choice.library.name
        if code < 0:
            raise QbenchError(
                f"{name}: its process was ended by {signal.Signals(-code).name}. A system that is short of memory does "
                f"this. What it said is in {log}."
            )
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no word")
            raise QbenchError(f"{name} failed: {last} What it said is in {log}.")
