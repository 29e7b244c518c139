"""What a recipe asks of another library: which method, with which options, under which interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from qbench.errors import QbenchError
from qbench.formats.parse import build
from qbench.peers.methods import PEERS, Library


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
    def nominal_bits(self) -> float:
        """Bits of a code, as the options, the scheme or the method name them."""
        named = next((self.options[key] for key in ("bits", "nbits", "w_bit", "scheme") if self.options.get(key)), None)
        found = re.search(r"\d", str(named or self.method))
        assert found is not None, named
        return float(found[0])

    @property
    def calibrates(self) -> bool:
        """Whether the calibration rows decide anything."""
        options = build(self.library.methods, {"name": self.method, **self.options})
        return getattr(options, "calibrates", True)

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


def checked(asked: Any) -> dict[str, Any]:
    """What `with` says as plain values, every default filled in; a recipe's validator, so it raises ValueError."""
    if not isinstance(asked, str | dict):
        raise ValueError(f"found {asked!r}; expected a library's name or a mapping with `library`")
    if not asked:
        return {}
    try:
        choice = read_choice(asked)
    except QbenchError as error:
        raise ValueError(str(error)) from error
    return choice.to_dict() | ({"python": choice.python} if choice.python else {})


def schema(field: dict[str, Any]) -> None:
    """Makes `field` the JSON Schema of what `with` may say: a name, or the options of every method, each optional."""
    properties: dict[str, Any] = {
        "library": {"enum": PEERS.names()},
        "method": {"enum": []},
        "python": {"type": "string", "description": "The interpreter that has the library; else this one."},
    }
    for library in map(PEERS.get, PEERS.names()):
        for method in library.methods.names():
            if method not in properties["method"]["enum"]:
                properties["method"]["enum"].append(method)
            for key, option in TypeAdapter(library.methods.get(method)).json_schema().get("properties", {}).items():
                known = properties.setdefault(key, {"description": "Option of", "anyOf": []})
                if library.name not in known["description"]:
                    known["description"] += f" {library.name}"
                allowed = {k: v for k, v in option.items() if k not in ("default", "title")}
                if allowed not in known["anyOf"]:
                    known["anyOf"].append(allowed)
    mapping = {"type": "object", "properties": properties, "required": ["library"], "additionalProperties": False}
    description = field["description"]
    field.clear()
    field.update(description=description, anyOf=[{"enum": PEERS.names()}, mapping])


Asked = Annotated[  # a recipe's field: empty, or `read_choice` takes it
    dict[str, Any],
    BeforeValidator(checked),
    Field(
        alias="with",
        description="Another library makes this variant: its name, or its name, method and options. Stands alone.",
        json_schema_extra=schema,
    ),
]


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
    return done.stdout.strip() or None if done.returncode == 0 else None  # a program that is no Python prints nothing
