"""The parts of a recipe that say what is fed to the models: calibration rows and evaluation rows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qbench.calibration.data import SELF_GENERATED, has_splits

Count = Annotated[int, Field(ge=1, le=1_000_000_000, strict=True)]
Share = Annotated[float, Field(gt=0, le=1)]


def differ(values: list[Any]) -> list[Any]:
    """A validator: no value is given twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"found {values!r}, where a value is given twice")
    return values


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values are not changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, serialize_by_alias=True)


class Rows(Section):
    """Token rows cut from a text."""

    data: str = Field(
        default="wiki-paragraphs",
        description="A set in calib_data/ by name, or a .txt, .jsonl, .parquet or manifest (.yaml) file.",
    )
    split: str | None = Field(default=None, description="Part of a set; a file of text has none.")
    column: str | None = Field(
        default=None, description="Where a .jsonl or .parquet file has its documents; else messages, else text."
    )
    rows: Count = Field(default=32, description="Number of rows.")
    seq_len: Annotated[int, Field(ge=2, strict=True)] = Field(default=512, description="Tokens a row.")

    default_split: ClassVar[str]

    @field_validator("split", mode="after")
    @classmethod
    def _default_split(cls, split: str | None, info: ValidationInfo) -> str | None:
        return cls.default_split if split is None and has_splits(str(info.data.get("data"))) else split


class Sampling(Section):
    """How the model writes its own calibration text."""

    start: Literal["random", "bos"] = Field(
        default="random", description="The first token of a row: drawn from the vocabulary, or beginning-of-text."
    )
    temperature: Annotated[float, Field(gt=0, le=10)] = Field(
        default=1.0, description="Of the distribution drawn from."
    )
    top_k: Annotated[int, Field(ge=0, strict=True)] = Field(default=0, description="Likeliest tokens kept; 0: all.")
    top_p: Share = Field(default=1.0, description="Likeliest tokens kept, by their total probability.")


class Calibration(Rows):
    """The rows from which activation statistics are collected."""

    default_split: ClassVar[str] = "calibration"

    data: str = Field(
        default="wiki-paragraphs",
        description="A set in calib_data/ by name; a .txt, .jsonl, .parquet or manifest (.yaml) file; or "
        f"{SELF_GENERATED}: text that the model writes.",
    )
    packing: Literal["packed", "documents"] = Field(
        default="packed",
        description="packed: documents joined, then cut; documents: each begins a row, rows differ in length.",
    )
    sampling: Sampling = Field(default=Sampling(), description=f"Of data {SELF_GENERATED}.")
    imatrix: str | None = Field(
        default=None,
        description="A file of `qbench imatrix` or llama.cpp, for solvers that weigh by importance.",
    )

    def changed(self, changes: Calibration) -> Calibration:
        """These rows with the fields that `changes` sets; other data leaves what only the old data had."""
        fields = self.model_dump(exclude_unset=True)
        new = changes.model_dump(exclude_unset=True)
        if new.get("data", self.data) != self.data:
            fields = {key: value for key, value in fields.items() if key not in ("split", "column", "sampling")}
        return Calibration.model_validate(fields | new)

    @model_validator(mode="after")
    def _sampling_is_for_self_generated(self) -> Calibration:
        if self.data == SELF_GENERATED:
            for option in ("split", "column"):
                if getattr(self, option) is not None:
                    raise ValueError(f"data {SELF_GENERATED} has no {option}")
            if self.seq_len < 3:
                raise ValueError(f"data {SELF_GENERATED} needs a seq_len of at least 3; found {self.seq_len}")
        elif "sampling" in self.model_fields_set and self.sampling != Sampling():
            raise ValueError(f"sampling is for data {SELF_GENERATED}; data is {self.data}")
        return self


def _only_what_is_set(changes: Calibration) -> dict[str, Any]:
    return changes.model_dump(mode="json", exclude_unset=True)


CalibrationChanges = Annotated[Calibration, PlainSerializer(_only_what_is_set)]  # written with the fields that are set


class Evaluate(Rows):
    """Quality, measured on rows that calibration has not seen."""

    default_split: ClassVar[str] = "held-out"

    rows: Count = Field(default=16, description="Number of rows.")
    metrics: Annotated[list[Literal["perplexity", "divergence"]], AfterValidator(differ)] = Field(
        default=["perplexity", "divergence"],
        min_length=1,
        description="divergence: KL(reference || variant) in nats and top-1 agreement.",
    )

    @field_validator("data")
    @classmethod
    def _is_not_self_generated(cls, data: str) -> str:
        if data == SELF_GENERATED:
            raise ValueError(f"{SELF_GENERATED} text is for calibration; a model is measured on text it did not write")
        return data
