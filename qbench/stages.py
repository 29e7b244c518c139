"""The stages of one variant, each kept in the run's folder with the key of what it was made from.

A stage whose key is unchanged is not run again: changing only `evaluate` in a recipe reruns only the evaluation.

    variants/NAME/model/            the compressed model       (compress.json: its key, layers, rows)
    variants/NAME/gguf/, gptq/, ... its exports                (export-LAYOUT.json)
    variants/NAME/quality.json      perplexity and divergence
    variants/NAME/speed.json        latency, throughput, memory
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qbench
from qbench.errors import QbenchError
from qbench.inputs import CalibrationRows, Inputs
from qbench.measure import MeasureJob, run_job, write_stage
from qbench.models.json_file import read_json
from qbench.progress import console
from qbench.recipe import Recipe, stage_key
from qbench.resources import LOCK, is_leftover, sha256_file
from qbench.result import Result, make_results, result_from_dict
from qbench.scheme import Scheme

if TYPE_CHECKING:
    from qbench.compress.solve import LayerReport
    from qbench.formats.kv_cache import KVFormat
    from qbench.models.source import ModelSource

REFERENCE = "reference"


@dataclass
class Stages:
    """One variant (or the reference, which has no schemes) of a run in `out`."""

    recipe: Recipe
    out: Path
    name: str
    inputs: Inputs
    inputs_key: str  # of the evaluation windows and benchmark tokens
    inputs_file: Path
    provenance: dict[str, Any]
    schemes: Mapping[str, Scheme] | None = None

    @property
    def folder(self) -> Path:
        return self.out / "variants" / self.name

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def _source(self) -> ModelSource:
        """What is compressed: the reference, rotated if the variant says so."""
        if self.schemes is None or not self.recipe.variants[self.name].rotate:
            return self.inputs.source
        from qbench.transforms.hadamard import Rotated

        return Rotated(self.inputs.source, self.recipe.seed)

    @property
    def calibration(self) -> CalibrationRows:
        return self.inputs.calibration(self.recipe.calibration_of(self.name))

    @property
    def _kv_format(self) -> KVFormat | None:
        return self.recipe.variants[self.name].kv_format

    @property
    def model_key(self) -> str:
        """Of the weights: source, schemes, calibration rows. The reference is its source."""
        revision = self._source.revision
        if self.schemes is None:
            return stage_key(REFERENCE, revision, qbench.__version__)
        plain = {name: scheme.to_dict() for name, scheme in self.schemes.items()}
        kv_cache = [self._kv_format.to_dict()] if self._kv_format is not None else []
        parts = [*kv_cache, *([sha256_file(self._imatrix)] if self._imatrix is not None else [])]
        return stage_key("compress", qbench.__version__, revision, plain, self.calibration.token_ids, *parts)

    @property
    def _imatrix(self) -> Path | None:
        """The file that says how errors are weighed, where a solver does so."""
        path = self.calibration.wanted.imatrix
        if path is None or not any(scheme.weighs_importance for scheme in (self.schemes or {}).values()):
            return None
        return Path(path)

    def run(self) -> None:
        """Runs what is not there yet."""
        if self.schemes is not None:
            self._compress()
            self._export()
        self._measure()

    def rows(self) -> list[Result]:
        """What is known of the variant under the present recipe."""
        return [row for path, key in self._files() for row in _read_rows(path, key, self.name, self.provenance)]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do: every record is there and so is what it stands for."""
        made = []
        if self.schemes is not None:
            made = [self.model_folder, *(self.folder / options["label"] for *_, options in self._exports())]
        return all(path.is_dir() for path in made) and all(is_current(path, key) for path, key in self._files())

    def _files(self) -> list[tuple[Path, str]]:
        files = []
        if self.schemes is not None:
            files.append((self.folder / "compress.json", self.model_key))
            files += [(path, key) for path, key, _ in self._exports()]
        if self._times_requests:
            files.append((self.folder / "speed.json", self._speed_key))
        if self.recipe.evaluate is not None:
            files.append((self.folder / "quality.json", self._quality_key))
        return files

    @property
    def _times_requests(self) -> bool:
        return self.recipe.benchmark is not None

    @property
    def _quality_key(self) -> str:
        model = self.recipe.model
        reference = self.inputs.source.revision
        return stage_key("quality", self.model_key, reference, self.inputs_key, model.dtype, model.device)

    @property
    def _speed_key(self) -> str:
        model = self.recipe.model
        return stage_key("speed", self.model_key, self.inputs_key, self.recipe.benchmark, model.dtype, model.device)

    def _compress(self) -> None:
        if is_current(self.folder / "compress.json", self.model_key) and self.model_folder.is_dir():
            return
        from qbench.compress.engine import compress
        from qbench.runtime.placement import choose_device

        schemes = self.schemes
        assert schemes is not None
        if self._imatrix is not None:
            from qbench.calibration.imatrix import load_imatrix
            from qbench.compress.imatrix import with_importance

            schemes = with_importance(schemes, load_imatrix(self._imatrix))
        started = time.perf_counter()
        done = compress(
            self._source,
            schemes,
            self.calibration.token_ids,
            self.model_folder,
            key=self.model_key,
            kv_cache=self._kv_format,
            device=choose_device(self.recipe.model.device),
            label=f"{self.name}: compress",
        )
        seconds = time.perf_counter() - started
        measured = _compression_rows(done.layers, done.model.tensors, seconds)
        if any(scheme.uses_statistics or scheme.transform is not None for scheme in schemes.values()):
            measured += _expert_rows(done.layers)
        measured.append(("disk_bytes", _folder_bytes(self.model_folder), {}))
        rows = make_results(self.name, measured, {**self.provenance, **self.calibration.provenance()})
        layers = [asdict(layer) for layer in done.layers]
        write_stage(self.folder / "compress.json", self.model_key, rows, layers=layers)

    def _exports(self) -> list[tuple[Path, str, dict[str, Any]]]:
        """The record, key and options of each export; two of one layout are told apart by their type."""
        found = []
        for export in self.recipe.variants[self.name].export:
            options = export.model_dump(exclude_none=True)
            label = "-".join(str(value) for value in options.values())
            path = self.folder / f"export-{label}.json"
            found.append((path, stage_key("export", self.model_key, options), {**options, "label": label}))
        return found

    def _export(self) -> None:
        from qbench.export.layouts import LAYOUTS
        from qbench.models.source import open_model

        for record, key, options in self._exports():
            if is_current(record, key) and (self.folder / options["label"]).is_dir():
                continue
            layout, label = options.pop("layout"), options.pop("label")
            console.print(f"{self.name}: export {label}", style="dim")
            record.unlink(missing_ok=True)
            report = LAYOUTS.get(layout)(open_model(self.model_folder), self.folder / label, **options)
            at = {"layout": label}
            measured = [
                ("export_bytes", report.nbytes, at),
                ("export_max_abs_difference", report.max_abs_difference, at | {"what": "all"}),
                ("export_max_abs_difference", report.quantized_max_abs_difference, at | {"what": "quantized"}),
            ]
            rows = make_results(self.name, measured, self.provenance)
            write_stage(record, key, rows, report=report.to_dict())

    def export_reports(self) -> list[dict[str, Any]]:
        """What each finished export says of itself (`ExportReport.to_dict`, and its label)."""
        if self.schemes is None:
            return []
        return [
            {"label": options["label"], **_record(record)["report"]}
            for record, key, options in self._exports()
            if is_current(record, key)
        ]

    def _measure(self) -> None:
        quality, speed = self.folder / "quality.json", self.folder / "speed.json"
        states = self.out / "variants" / REFERENCE / "states.safetensors"
        want_quality = self.recipe.evaluate is not None and not (
            is_current(quality, self._quality_key) and (self.schemes is not None or states.is_file())
        )
        want_speed = self._times_requests and not is_current(speed, self._speed_key)
        if not (want_quality or want_speed):
            return
        job = MeasureJob(
            variant=self.name,
            recipe=self.recipe.model_dump(mode="json"),
            folder=str(self.model_folder) if self.schemes is not None else None,
            inputs=str(self.inputs_file),
            states=str(states),
            provenance=self.provenance,
            quality=str(quality) if want_quality else None,
            quality_key=self._quality_key,
            speed=str(speed) if want_speed else None,
            speed_key=self._speed_key,
        )
        run_job(job, self.folder / "job.json")
        (self.folder / "job.json").unlink()


def _compression_rows(
    layers: list[LayerReport], tensors: Mapping[str, Any], seconds: float
) -> list[tuple[str, float, dict[str, Any]]]:
    if not layers:
        return [("compress_seconds", seconds, {})]
    weights = {layer.module: math.prod(tensors[f"{layer.module}.weight"].shape) for layer in layers}
    bits = sum(layer.bits_per_weight * weights[layer.module] for layer in layers) / sum(weights.values())
    rows: list[tuple[str, float, dict[str, Any]]] = [
        ("compress_seconds", seconds, {}),
        ("bits_per_weight", bits, {}),
        ("calibration_tokens", max(layer.tokens for layer in layers), {}),
        *_counted("solver_fallbacks", [layer.fallback for layer in layers]),
        *_counted("transforms_skipped", [(layer.transform or {}).get("skipped") for layer in layers]),
    ]
    if pruned := {layer.module: layer.sparsity for layer in layers if layer.sparsity is not None}:
        zeros = sum(share * weights[module] for module, share in pruned.items())
        rows.append(("sparsity", zeros / sum(weights[module] for module in pruned), {}))
    damped = [layer for layer in layers if layer.damping is not None]
    if damped:
        worst = max(damped, key=lambda layer: layer.damping or 0.0)
        rows.append(("solver_damping", worst.damping or 0.0, {"module": worst.module}))
    rows += [
        ("layer_error", layer.relative_error, {"layer": layer.block, "module": layer.module})
        for layer in layers
        if layer.relative_error is not None
    ]
    return rows


def _counted(metric: str, reasons: list[str | None]) -> list[tuple[str, float, dict[str, Any]]]:
    """How many layers have a reason, in all and for each."""
    counts = Counter(reason for reason in reasons if reason is not None)
    return [(metric, counts.total(), {}), *((metric, count, {"reason": reason}) for reason, count in counts.items())]


def _expert_rows(layers: list[LayerReport]) -> list[tuple[str, float, dict[str, Any]]]:
    """The tokens that reached each expert of a mixture."""
    tokens: dict[tuple[int | None, str], int] = {}
    for layer in layers:
        if ".experts." in layer.module:
            key = layer.block, layer.module.rpartition(".")[0]
            tokens[key] = max(layer.tokens, tokens.get(key, 0))
    return [("expert_tokens", count, {"layer": block, "module": name}) for (block, name), count in tokens.items()]


def reference_rows(source: ModelSource, provenance: dict[str, Any], bits: float) -> list[Result]:
    """Size of the reference: its own files, unless it was dequantized and is in no file as it is measured."""
    measured: list[tuple[str, float, dict[str, Any]]] = [("bits_per_weight", bits, {})]
    if source.grid is None and getattr(source, "off_grid_of", None) is None:
        measured.append(("disk_bytes", sum(info.nbytes for info in source.tensors.values()), {}))
    return make_results(REFERENCE, measured, provenance)


def check_folder(out: Path, recipe: Recipe) -> None:
    """Refuses a folder that holds another recipe's run, or something that is no run."""
    if not out.exists():
        return
    if not out.is_dir():
        raise QbenchError(f"{out} is a file; --out must be a folder (it is made when missing).")
    record = out / "run.json"
    if record.is_file():
        found = read_json(record).get("recipe_name")
        if found != recipe.name:
            raise QbenchError(f"{out} holds the run of recipe {found!r}, not {recipe.name!r}. Choose another --out.")
    elif any(path.name != LOCK and not is_leftover(path) for path in out.iterdir()):
        raise QbenchError(f"{out} is not empty and holds no run of qbench. Choose another --out, or empty it.")


def is_current(path: Path, key: str) -> bool:
    """Whether a stage's record is there and was made from what `key` stands for."""
    return path.is_file() and _record(path)["key"] == key


def _record(path: Path) -> dict[str, Any]:
    """What `write_stage` wrote. Raises `QbenchError` when it is not that any more."""
    try:
        stored = read_json(path)
        for row in stored["rows"]:
            result_from_dict(row)
        if not isinstance(stored["key"], str):
            raise TypeError("key is no text")
    except (QbenchError, KeyError, TypeError) as error:
        raise QbenchError(f"{path}: damaged ({error}). Delete it; the same command then makes it again.") from error
    return stored


def _read_rows(path: Path, key: str, name: str, provenance: dict[str, Any]) -> list[Result]:
    if not is_current(path, key):
        return []
    current = {"recipe_hash": provenance["recipe_hash"]}
    rows = map(result_from_dict, _record(path)["rows"])
    return [replace(row, provenance={**row.provenance, **current}) for row in rows]


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
