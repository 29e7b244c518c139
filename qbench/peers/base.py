"""Running another library: what was asked for, the interpreter that has it, and its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from qbench.errors import QbenchError
from qbench.formats.parse import build
from qbench.models.json_file import read_json
from qbench.peers.methods import PEERS, Library
from qbench.progress import progress_bar
from qbench.resources import written_whole

WORKER = Path(__file__).with_name("worker.py")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Choice:
    """A library's method with its options, and the interpreter to run it under (None: the environment says)."""

    library: Library
    method: str
    options: dict[str, Any]
    python: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What decides the result, as plain values: the interpreter does not."""
        return {"library": self.library.name, "method": self.method, **self.options}

    @property
    def interpreter(self) -> str:
        """`python` if given, else what QBENCH_PEER_PYTHON_<LIBRARY> names, else the one that runs qbench."""
        return self.python or os.environ.get(self.variable) or sys.executable

    @property
    def variable(self) -> str:
        return f"QBENCH_PEER_PYTHON_{self.library.name.upper().replace('-', '_')}"

    @property
    def version(self) -> str:
        """The version that is installed. Raises `QbenchError` saying what to install where."""
        library, interpreter = self.library, self.interpreter
        try:
            found = _installed(interpreter, library.package)
        except OSError as error:
            raise QbenchError(
                f"{library.name}: the interpreter {interpreter} cannot be run: {error.strerror}."
            ) from error
        if found is None:
            raise QbenchError(
                f"{library.name} is not installed: {interpreter} has no package {library.package}. Allowed: "
                f"{library.install}; `python: INTERPRETER` beside `library`, or the variable {self.variable}, names "
                "another interpreter."
            )
        return found


def read_choice(asked: str | dict[str, Any]) -> Choice:
    """What a recipe says under `with`: a library's name, or a mapping of `library`, `method`, `python` and options.

    Raises `QbenchError` on an unknown library, method or option, or a value of the wrong kind.
    """
    given = {"library": asked} if isinstance(asked, str) else dict(asked)
    library: Library = PEERS.get(given.pop("library", None))
    python = given.pop("python", None)
    if python is not None and not isinstance(python, str):
        raise QbenchError(f"{library.name}: python is {python!r}; allowed: the path of an interpreter.")
    method = given.pop("method", library.default)
    options = build(library.methods, {"name": method, **given})
    return Choice(library, method, asdict(options), python)


def check_widths(choice: Choice, widths: set[int]) -> None:
    """Refuses groups that do not divide rows of every one of `widths`: no library here has partial groups."""
    options = build(choice.library.methods, {"name": choice.method, **choice.options})
    size = getattr(options, "group_size", None)
    if size is None or size == -1:
        return
    if size < 1 or any(width % size for width in widths):
        fitting = [n for n in (16, 32, 64, 128, 256) if not any(width % n for width in widths)]
        raise QbenchError(
            f"{choice.library.name} {choice.method}: groups of {size} do not divide rows of "
            f"{', '.join(map(str, sorted(widths)))}. Allowed here: {', '.join(map(str, fitting)) or 'none'}."
        )


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
                env=os.environ | QUIET,
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


@cache
def _installed(interpreter: str, package: str) -> str | None:
    """The version of `package` under `interpreter`; None where it is not installed."""
    if interpreter == sys.executable:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([interpreter, "-P", "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
