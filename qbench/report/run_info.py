"""`run.json`: what a report says about a run beyond its numbers. Written by the run, read by the report."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from qbench.errors import QbenchError
from qbench.resources import written_whole

Facts = dict[str, str | int | float | bool | None]  # shown as they are, in order; the key is the label


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VariantInfo(_Part):
    name: str
    description: str = ""  # "int4, groups of 32, GPTQ"


class FileInfo(_Part):
    name: str  # relative to the export's folder
    bytes: int


class ExportInfo(_Part):
    """An export that was read back: what differs from the variant it was made of."""

    variant: str
    layout: str
    folder: str
    files: list[FileInfo]
    bits_per_weight: float
    max_abs_difference: float  # over all weights, read back against ours; 0: exact
    worst_tensor: str | None = None
    notes: list[str] = []


class RunInfo(_Part):
    """The keys of `run.json`.

    `variants` are in the recipe's order and only they are shown; the one named `reference` is what the others are
    compared with. `model` (source, revision, architecture, parameters, off-grid, ...), `data`, `machine` and
    `versions` are facts to show; `timings` are seconds by stage; `warnings` are sentences. Times are ISO 8601.
    """

    name: str
    recipe: str  # its text
    recipe_hash: str
    started: str
    finished: str
    reference: str | None = "reference"
    variants: list[VariantInfo]
    model: Facts
    data: Facts = {}
    machine: Facts = {}
    versions: dict[str, str] = {}
    timings: dict[str, float] = {}
    exports: list[ExportInfo] = []
    warnings: list[str] = []

    def write(self, run_dir: Path) -> None:
        with written_whole(run_dir / "run.json") as temporary:
            temporary.write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> RunInfo:
        """Raises `QbenchError` when the folder is not one of a run, or its `run.json` cannot be understood."""
        path = run_dir / "run.json"
        if not path.is_file():
            raise QbenchError(f"{run_dir} is not the folder of a run: it has no run.json.")
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise QbenchError(f"{path}: {where}: {first['msg']}.") from error
