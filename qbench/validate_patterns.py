"""The part of validation that is about patterns: rules and ignores that match nothing, or that others overrule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qbench.models.source import ModelSource
from qbench.models.structure import match
from qbench.recipe import Rule, Variant
from qbench.registry import nearest
from qbench.resolve import module_shapes


def check_patterns(name: str, variant: Variant, source: ModelSource) -> tuple[list[str], list[str]]:
    """Rules that match no module, which are refused, and ignores that match none, which are warned about."""
    modules = list(module_shapes(source))

    def unmatched(pattern: str) -> bool:
        return not any(match(pattern, module) for module in modules)

    wrong = [
        f"variants.{name}.rules[{index}].match: {rule.match!r} matches no module. {_closest(rule.match, modules)}"
        for index, rule in enumerate(variant.rules)
        if unmatched(rule.match)
    ]
    warnings = [
        f"variants.{name}.ignore[{index}]: {pattern!r} matches no module and has no effect."
        for index, pattern in enumerate(variant.ignore)
        if unmatched(pattern)
    ]

    def decided_later(pattern: str, rules: Sequence[Rule]) -> bool:
        matching = [module for module in modules if match(pattern, module)]
        return bool(matching) and all(any(match(rule.match, module) for rule in rules) for module in matching)

    warnings += [
        f"variants.{name}.rules[{index}]: later rules decide every module that {rule.match!r} matches; it has no "
        "effect (the last rule that matches a module decides all of it)."
        for index, rule in enumerate(variant.rules)
        if decided_later(rule.match, variant.rules[index + 1 :])
    ]
    warnings += [
        f"variants.{name}.ignore[{index}]: rules decide every module that {pattern!r} matches; it has no effect."
        for index, pattern in enumerate(variant.ignore)
        if decided_later(pattern, variant.rules)
    ]
    return wrong, warnings


def _closest(pattern: str, modules: Iterable[str]) -> str:
    """A hint that lists each kind of module once: the names without what comes before the layer's own part."""
    kinds = {module.partition(".layers.")[2].partition(".")[2] or module for module in modules}
    return nearest(pattern, kinds)
