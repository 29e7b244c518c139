"""YAML files as plain trees that remember where each value stands, with inheritance and command-line overrides."""

from __future__ import annotations

import os
import re
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import QbenchError
from qbench.registry import nearest

MAX_VALUES = 100_000  # in one recipe, aliases written out
KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of version 1.2: ``1e-3`` is one, and ``2:4`` is text where 1.1 counts in sixties."""


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_NUMBERS = {"tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "tag:yaml.org,2002:float": _FLOAT}
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _NUMBERS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))


@dataclass
class Tree:
    """A mapping and, for each path in it, the place (``file:line``) its value was written."""

    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where `path` was written, or the nearest enclosing value that was; empty when nothing is known."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "")


def path_text(path: KeyPath) -> str:
    """``variants.gptq.rules[0].match``, as it is shown in messages."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def read_tree(file: Path) -> Tree:
    """One YAML file, its `extends` not followed. Raises `QbenchError` on anything but a mapping with unique keys."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise QbenchError(f"{file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise QbenchError(f"{file}: a recipe is UTF-8 text ({error}).") from error
    root, data = _parsed(text, str(file))
    if not isinstance(data, dict):
        raise QbenchError(f"{file}: expected a mapping of keys to values at the top level.")
    places: dict[KeyPath, str] = {}
    repeated: list[str] = []
    _walk(root, (), file, places, repeated, set())
    if repeated:
        raise QbenchError("\n".join(repeated))
    return Tree(data, places)


def _parsed(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """The nodes and the value of a YAML text. Raises `QbenchError` when it is not valid or aliases make it endless."""
    try:
        root = yaml.compose(text, _Loader)
        if _expanded(root, {}) > MAX_VALUES:
            raise QbenchError(f"{where}: its aliases make it more than {MAX_VALUES} values.")
        return root, yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise QbenchError(f"{where}: not valid YAML: {error}") from error
    except RecursionError:
        raise QbenchError(f"{where}: nested too deeply, or an alias lies inside what it stands for.") from None


def _expanded(node: yaml.Node | None, known: dict[int, int]) -> int:
    """The number of values below `node` when every alias is written out."""
    if node is None or id(node) in known:
        return known.get(id(node), 0)
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_expanded(item, known) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_expanded(part, known) for pair in node.value for part in pair)
    known[id(node)] = total
    return total


def _walk(
    node: yaml.Node | None,
    path: KeyPath,
    file: Path,
    places: dict[KeyPath, str],
    repeated: list[str],
    seen: set[int],
) -> None:
    """Records each value's place and each key written twice; what an alias repeats is seen once."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[*path, index] = f"{file}:{item.start_mark.line + 1}"
            _walk(item, (*path, index), file, places, repeated, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in first and name != "<<":
                shown = path_text((*path, name))
                repeated.append(f"{file}:{line}: {shown} is written twice (first on line {first[name]}).")
            first.setdefault(name, line)
            places[*path, name] = f"{file}:{line}"
            _walk(value, (*path, name), file, places, repeated, seen)


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`base` with `override` on top: mappings are merged key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in override.items():
        inherited = merged.get(key)
        both = isinstance(inherited, dict) and isinstance(value, dict)
        merged[key] = deep_merge(inherited, value) if both else value  # type: ignore[arg-type]
    return merged


def read_extended(file: Path, chain: tuple[Path, ...] = ()) -> Tree:
    """A file merged over the one its `extends` names (relative to the file). The base's `name` is not inherited."""
    here = Path(os.path.realpath(file))
    if here in chain:
        circle = " -> ".join(str(f) for f in (*chain[chain.index(here) :], here))
        raise QbenchError(f"{file}: extends goes round in a circle: {circle}")
    tree = read_tree(file)
    parent = tree.data.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise QbenchError(f"{tree.place(('extends',))}: extends: found {parent!r}, expected the path of a recipe.")
    if not os.path.isfile(file.parent / parent):  # noqa: PTH113 (Path.is_file raises on a name that is too long)
        raise QbenchError(f"{tree.place(('extends',))}: extends: no file {file.parent / parent}.")
    base = read_extended(file.parent / parent, (*chain, here))
    base.data.pop("name", None)
    return Tree(deep_merge(base.data, tree.data), base.places | tree.places)


def set_value(tree: Tree, assignment: str) -> None:
    """Applies ``a.b.0.c=VALUE`` (VALUE read as YAML) in place.

    Mappings on the way are created, except inside a mapping of free names (`variants`), where the name must exist.
    """
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise QbenchError(f"--set {assignment}: expected key=value, such as variants.gptq.format.bits=3.")
    if key.strip().partition(".")[0] == "extends":
        raise QbenchError(f"--set {assignment}: extends can only be changed in the recipe itself.")
    _, value = _parsed(text, f"--set {assignment}")
    path: list[str | int] = []
    node: Any = tree.data
    steps = key.strip().split(".")
    for step in steps[:-1]:
        node = _child(node, step, path, assignment)
    _assign(node, steps[-1], value, path, assignment)
    tree.places = {p: v for p, v in tree.places.items() if p[: len(path)] != tuple(path)}
    tree.places[tuple(path)] = f"--set {assignment}"


def _child(node: Any, step: str, path: list[str | int], assignment: str) -> Any:
    if isinstance(node, list):
        index = _index(node, step, path, assignment)
        path.append(index)
        node[index] = copy(node[index])  # what an alias shares is changed in one place only
        return node[index]
    if not isinstance(node, dict):
        raise QbenchError(f"--set {assignment}: {path_text(tuple(path))} holds {node!r}, which has no keys.")
    if path == ["variants"] and step not in node:
        raise QbenchError(f"--set {assignment}: no variant {step!r}. {nearest(step, map(str, node))}")
    path.append(step)
    node[step] = {} if node.get(step) is None else copy(node[step])
    return node[step]


def _assign(node: Any, step: str, value: Any, path: list[str | int], assignment: str) -> None:
    if isinstance(node, list):
        index = _index(node, step, path, assignment)
        path.append(index)
        node[index] = value
    elif isinstance(node, dict):
        path.append(step)
        node[step] = value
    else:
        raise QbenchError(f"--set {assignment}: {path_text(tuple(path))} holds {node!r}, which has no keys.")


def _index(node: list[Any], step: str, path: list[str | int], assignment: str) -> int:
    if not step.isdecimal() or int(step) >= len(node):
        raise QbenchError(f"--set {assignment}: {path_text(tuple(path))} is a list of {len(node)}; found {step!r}.")
    return int(step)
