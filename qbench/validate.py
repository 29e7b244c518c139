"""Checking a recipe against its model before anything long starts: only the model's header is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qbench.errors import QbenchError
from qbench.estimate import Estimate, Estimator, machine_speed
from qbench.export.gguf import check_tokenizer, other_types
from qbench.export.layouts import CHECKS
from qbench.models.source import ModelSource
from qbench.models.structure import block_count, head_dim, layer_index, linear_names
from qbench.peers.choice import check_widths
from qbench.recipe import Recipe, Variant
from qbench.resolve import module_shapes, replaced, resolve
from qbench.runtime.placement import choose_device
from qbench.scheme import Scheme
from qbench.solvers.base import zero_refusal
from qbench.transforms.hadamard import Rotated
from qbench.validate_code import check_code
from qbench.validate_data import check_importance, check_rows, seen_before
from qbench.validate_patterns import check_patterns

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """A recipe that may run: what each variant does to which module, what it will take, and what to know first."""

    recipe: Recipe
    schemes: dict[str, dict[str, Scheme]]  # variant -> module -> scheme
    estimates: dict[str, Estimate]  # the reference first
    warnings: list[str]

    @property
    def memory(self) -> int:
        """Peak bytes: one variant is held at a time."""
        return max(max(e.compress_memory, e.run_memory) for e in self.estimates.values())

    @property
    def disk(self) -> int:
        """Bytes of everything the run writes."""
        return sum(estimate.disk for estimate in self.estimates.values())

    @property
    def seconds(self) -> float:
        return sum(estimate.seconds for estimate in self.estimates.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "recipe": self.recipe.name,
            "recipe_hash": self.recipe.hash,
            "memory_bytes": self.memory,
            "disk_bytes": self.disk,
            "seconds": round(self.seconds, 1),
            "warnings": self.warnings,
            "variants": {
                name: {"modules": len(self.schemes.get(name, {})), **asdict(estimate)}
                for name, estimate in self.estimates.items()
            },
        }

    def print(self, console: Console) -> None:
        """The table, the totals and the warnings."""
        table = Table(title=f"Plan of {self.recipe.name}")
        table.add_column("variant", overflow="fold")
        for heading in ("modules", "bits", "weights", "memory", "disk", "time"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, estimate in self.estimates.items():
            memory = max(estimate.compress_memory, estimate.run_memory)
            sizes = (f"{nbytes / GIB:.2f} GiB" for nbytes in (estimate.weight_bytes, memory, estimate.disk))
            bits = f"{estimate.bits_per_weight:.2f}"
            choice = self.recipe.variants[name].choice if name in self.recipe.variants else None
            modules = f"by {choice.library.name}" if choice else str(len(self.schemes.get(name, {})))
            table.add_row(name, modules, bits, *sizes, _duration(estimate.seconds))
        console.print(table)
        console.print(f"In all about {self.memory / GIB:.2f} GiB of memory, {self.disk / GIB:.2f} GiB on disk, "
                      f"{_duration(self.seconds)}.")  # fmt: skip
        for warning in self.warnings:
            console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def check(
    recipe: Recipe,
    source: ModelSource,
    *,
    out: Path | None = None,
    only: Iterable[str] | None = None,
    machine: bool = True,
) -> Plan:
    """Everything that can be known of a run before it starts. `source` is what `qbench.inputs.reference_source` opens.

    `out` is where the run will write (here, if not given), `only` the variants it will make (all). Raises one
    `QbenchError` that lists whatever makes the recipe impossible on this model and, unless `machine` is false, on this
    machine: its memory, its disk, the libraries that are installed.
    """
    wrong, warnings = _check_model(recipe, source)
    wrong += check_rows(recipe, source, recipe.chosen(only))
    warnings += seen_before(recipe, recipe.chosen(only))
    schemes: dict[str, dict[str, Scheme]] = {}
    for name in recipe.chosen(only):
        variant = recipe.variants[name]
        unmatched, ignored = check_patterns(name, variant, source)
        wrong += unmatched
        warnings += ignored
        schemes[name] = resolve(variant, source)
        warnings += [f"variants.{name}: {sentence}" for sentence in replaced(variant, source)]
        if not schemes[name] and not unmatched and variant.compresses_weights:
            wrong.append(f"variants.{name}: every module is ignored; nothing would be compressed.")
        wrong += _check_schemes(name, schemes[name], source)
        wrong += _check_peer(name, variant, source, machine)
        if variant.kv_format is not None:
            try:
                variant.kv_format.check(head_dim(source.config))
            except QbenchError as error:
                wrong.append(f"variants.{name}.kv_cache: {error}")
            if variant.export:
                warnings.append(f"variants.{name}.export: layouts hold weights only, no KV-cache format.")
        refused, told = _check_exports(name, variant, schemes[name], source)
        wrong += refused
        warnings += told
        unfit, unknown = check_importance(recipe, name, schemes[name], module_shapes(source), source)
        wrong += unfit
        warnings += unknown
        if variant.rotate:
            try:
                warnings += [f"variants.{name}.{sentence}" for sentence in Rotated(source, recipe.seed).kept]
            except QbenchError as error:
                wrong.append(f"variants.{name}.{error}")
    if not wrong:
        wrong = check_code(source, dict.fromkeys(module for found in schemes.values() for module in found))
    if not wrong:
        speed = machine_speed(choose_device(recipe.model.device))
        estimates = {"reference": Estimator(recipe, source, speed).reference()}
        for name, found in schemes.items():
            variant = recipe.variants[name]
            own = recipe.model_copy(update={"calibration": recipe.calibration_of(name)})
            estimator = Estimator(own, source, speed)
            made = estimator.variant(found, len(variant.export))
            estimates[name] = made if variant.choice is None else estimator.peer(variant.choice)
        plan = Plan(recipe, schemes, estimates, warnings)
        wrong = _check_machine(plan, out or Path.cwd()) if machine else []
    if wrong:
        raise QbenchError("\n".join([f"{recipe.name}: cannot run on {source.location}", *(f"  {w}" for w in wrong)]))
    return plan


def _check_model(recipe: Recipe, source: ModelSource) -> tuple[list[str], list[str]]:
    wrong, warnings = [], []
    if recipe.model.off_grid and getattr(source, "off_grid_of", None) is None:
        warnings.append("model.off_grid: the source lies on no known grid; permuting its channels changes nothing.")
    if source.grid is not None:
        warnings.append(
            f"The source's weights lie on the {source.grid} grid, which flatters formats like it; "
            "set model.off_grid to compare formats fairly."
        )
    held = {index for name in source.tensors if (index := layer_index(name)) is not None}
    if beyond := sorted(index for index in held if index >= block_count(source.config)):
        warnings.append(
            f"config.json says {block_count(source.config)} blocks; {len(beyond)} more are stored, from block "
            f"{beyond[0]} on (heads that predict further tokens are such), and are left out."
        )
    absent = [index for index in range(block_count(source.config)) if index not in held]
    if absent:
        depth = block_count(source.config)
        wrong.append(f"config.json says {depth} blocks; no tensor of block {absent[0]} is there.")
    elif recipe.evaluate is not None or recipe.benchmark is not None:
        from qbench.runtime.architecture import Architecture
        from qbench.runtime.weights import check_tensors

        try:
            check_tensors(source, Architecture.from_config(source.config))
        except QbenchError as error:
            wrong.append(f"the model cannot be measured (evaluate, benchmark): {error}")
    limit = source.config.get("max_position_embeddings")
    if (benchmark := recipe.benchmark) is not None and limit is not None:
        length = benchmark.prompt_tokens + benchmark.output_tokens
        if length > limit:
            wrong.append(f"benchmark: prompt and output tokens make {length}; the model's positions end at {limit}.")
    return wrong, warnings


def _check_peer(name: str, variant: Variant, source: ModelSource, machine: bool) -> list[str]:
    """Whether another library can make the variant: it is installed, and its groups divide the model's rows."""
    if (choice := variant.choice) is None:
        return []
    modules = linear_names(source.tensors, source.config)
    if any(".experts." in module for module in modules):
        return [f"variants.{name}.with: models with experts are not handed to other libraries."]
    shapes = module_shapes(source)
    try:
        check_widths(choice, {shapes[module][1] for module in modules})
        if machine:
            choice.version  # noqa: B018 (raises where the library is not installed)
    except QbenchError as error:
        return [f"variants.{name}.with: {error}"]
    return []


def _check_schemes(name: str, schemes: dict[str, Scheme], source: ModelSource) -> list[str]:
    """What modules are too narrow for or cannot be pruned by; one sentence a reason, with how many it concerns."""
    shapes = module_shapes(source)
    reasons: dict[str, list[str]] = {}
    for module, scheme in schemes.items():
        width = shapes[module][1]
        found = [("format", scheme.format.refusal(width))]
        if scheme.prune is not None:
            found += [("prune", zero_refusal(scheme.format)), ("prune", scheme.prune.refusal(width))]
        for axis, why in found:
            if why is not None:
                reasons.setdefault(f"{axis}: {why}", []).append(module)
    return [
        f"variants.{name}.{why}; {modules[0]}{f' and {len(modules) - 1} more' if modules[1:] else ''}."
        for why, modules in reasons.items()
    ]


def _check_exports(
    name: str, variant: Variant, schemes: dict[str, Scheme], source: ModelSource
) -> tuple[list[str], list[str]]:
    """What layouts cannot hold, and what they will hold otherwise than asked."""
    shapes = {module: shape for module, shape in module_shapes(source).items() if module in schemes}
    wrong, warnings = [], []
    for index, export in enumerate(variant.export):
        options = export.model_dump(exclude={"layout", "pre_tokenizer"}, exclude_none=True)
        rounded = {scheme.activation.name for scheme in schemes.values() if scheme.activation is not None}
        if rounded:
            wrong.append(
                f"variants.{name}.export[{index}]: layout {export.layout} holds weights only; the variant rounds "
                f"inputs to {', '.join(sorted(rounded))}. Allowed: activation: {{name: none}}, or no such export."
            )
        try:
            CHECKS.get(export.layout)(schemes, shapes, source.config, **options)
            if export.layout == "gguf":
                check_tokenizer(source, export.pre_tokenizer)
                told = other_types(schemes, shapes, export.type or "auto")
                warnings += [f"variants.{name}.export[{index}]: {sentence}" for sentence in told]
        except QbenchError as error:
            wrong.append(f"variants.{name}.export[{index}]: {error}")
    return wrong, warnings


def _check_machine(plan: Plan, out: Path) -> list[str]:
    """A disk that is too small is refused; memory beyond what the machine has is, beyond what is free now warned of."""
    import psutil

    memory = psutil.virtual_memory()
    wrong = []
    if plan.memory > memory.total + psutil.swap_memory().total:
        wrong.append(
            f"needs about {plan.memory / GIB:.1f} GiB of memory; the machine has {memory.total / GIB:.1f} GiB."
        )
    elif plan.memory > memory.available:
        plan.warnings.append(
            f"About {plan.memory / GIB:.1f} GiB of memory are needed; {memory.available / GIB:.1f} GiB are free now."
        )
    folder = next(place for place in (out.absolute(), *out.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(folder).free
    if plan.disk > free:
        wrong.append(f"needs about {_amount(plan.disk)} on disk; {folder} has {_amount(free)} free.")
    return wrong


def _amount(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
