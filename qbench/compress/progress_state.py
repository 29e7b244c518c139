"""What a killed compression leaves behind, so that the next one goes on from the last finished block.

The hidden states are stored, not recomputed: a recomputed chain of quantized blocks can differ in its last bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qbench.models.safetensors_writer import write_safetensors
from qbench.resources import written_whole


class ProgressState:
    """The unfinished model in `folder`, with its progress under ``progress/`` until `finish` moves it in place."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.blocks_done = 0
        self.reports: list[dict[str, Any]] = []
        self.kv_scales: list[tuple[float, float]] = []  # of the finished blocks, for a calibrated KV-cache format
        saved = self._read()
        if saved.get("key") == key:
            self.blocks_done = saved["blocks_done"]
            self.reports = saved["reports"]
            self.kv_scales = [(keys, values) for keys, values in saved["kv_scales"]]
            for torn in folder.rglob(".*.part"):  # a file that was being written when the run was killed
                torn.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
        self._progress.mkdir(parents=True, exist_ok=True)

    @property
    def _progress(self) -> Path:
        return self.folder / "progress"

    def _read(self) -> dict[str, Any]:
        path = self._progress / "state.json"
        state: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return state

    def _hidden_path(self, blocks_done: int) -> Path:
        return self._progress / f"hidden-{blocks_done:05d}.safetensors"

    def save(self, blocks_done: int, hidden: list[torch.Tensor], reports: list[dict[str, Any]]) -> None:
        """Records that `blocks_done` blocks are written, their `kv_scales`, and what goes into the next one."""
        write_safetensors(self._hidden_path(blocks_done), {f"{i:05d}": batch for i, batch in enumerate(hidden)})
        with written_whole(self._progress / "state.json") as temporary:
            state = {"key": self.key, "blocks_done": blocks_done, "reports": reports, "kv_scales": self.kv_scales}
            temporary.write_text(json.dumps(state))
        self._hidden_path(blocks_done - 1).unlink(missing_ok=True)

    def load_hidden(self) -> list[torch.Tensor]:
        """The hidden states that go into the next block, in memory of their own."""
        stored = load_file(self._hidden_path(self.blocks_done))
        return [stored[name].clone() for name in sorted(stored)]

    def finish(self, folder: Path) -> Path:
        """Drops the progress and moves the finished model to `folder`."""
        (self._progress / "state.json").unlink()
        shutil.rmtree(self._progress)
        if folder.exists():
            shutil.rmtree(folder)
        self.folder.replace(folder)
        return folder
