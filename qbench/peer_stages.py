"""The stages of a variant that another library makes: its run in place of ours, then quality. Its weights are floats
here, so that neither its speed nor its size on disk would say anything about it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import qbench
from qbench.errors import QbenchError
from qbench.measure import write_stage
from qbench.models.json_file import read_json
from qbench.peers.choice import Choice
from qbench.recipe import Recipe, stage_key
from qbench.result import Result, make_results
from qbench.stages import REFERENCE, Stages, is_current


def stages_of(recipe: Recipe, name: str) -> type[Stages]:
    """The kind of stages that the variant `name` (or the reference) goes through."""
    return PeerStages if name != REFERENCE and recipe.variants[name].choice is not None else Stages


class PeerStages(Stages):
    """As `Stages`, with another library's method instead of schemes."""

    @property
    def choice(self) -> Choice:
        choice = self.recipe.variants[self.name].choice
        assert choice is not None
        return choice

    @cached_property
    def version(self) -> str:
        """Of the library; where it is gone, of the one that made what is kept."""
        try:
            return self.choice.version
        except QbenchError:
            record = self.folder / "compress.json"
            if not record.is_file():
                return "none"
            return str(read_json(record)["facts"]["version"])

    @property
    def model_key(self) -> str:
        revision, rows = self.inputs.source.revision, self.calibration.token_ids
        parts = (self.choice.to_dict(), self.version, self.recipe.seed, self.recipe.model.device)
        return stage_key("peer", qbench.__version__, revision, rows, *parts)

    @property
    def _times_requests(self) -> bool:
        return False

    def _compress(self) -> None:
        if is_current(self.folder / "compress.json", self.model_key) and self.model_folder.is_dir():
            return
        from qbench.peers.model import bits_per_weight, run_peer
        from qbench.runtime.placement import choose_device

        rows = self.calibration.token_ids
        try:
            _, facts = run_peer(
                self.inputs.source,
                self.choice,
                rows,
                self.model_folder,
                device=str(choose_device(self.recipe.model.device)),
                seed=self.recipe.seed,
                label=f"{self.name}: {self.choice.library.name} {self.version}",
            )
        except QbenchError as error:
            raise QbenchError(f"{self.name}: {error}") from error
        measured: list[tuple[str, float, dict[str, Any]]] = [
            ("compress_seconds", facts["seconds"], {}),
            ("compress_peak_bytes", facts["peak_memory_bytes"], {}),
            ("bits_per_weight", bits_per_weight(facts, self.inputs.source), {}),
            ("calibration_tokens", self._tokens(rows), {}),
        ]
        results = make_results(self.name, measured, {**self.provenance, **self.calibration.provenance()})
        write_stage(self.folder / "compress.json", self.model_key, results, facts=facts)

    def _tokens(self, rows: list[list[int]]) -> int:
        """How many calibration tokens the library used."""
        if not self.choice.calibrates:
            return 0
        longest = max(map(len, rows))
        return sum(len(row) for row in rows if len(row) == longest or not self.choice.library.longest_rows_only)

    def rows(self) -> list[Result]:
        """As known, each with who made the variant."""
        found = super().rows()
        made_by = f"{self.choice.library.name} {self.version}"
        return [replace(row, provenance=row.provenance | {"made_by": made_by}) for row in found]
