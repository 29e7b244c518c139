"""From a variant and a model to one scheme a module."""

from __future__ import annotations

from dataclasses import replace

from qbench.formats.base import Format, format_from_dict
from qbench.gguf_mixes import mixed_formats
from qbench.models.source import ModelSource
from qbench.models.structure import block_count, layer_index, linear_names, match
from qbench.presets import PRESETS
from qbench.recipe import Variant
from qbench.scheme import Scheme

HEAD, EMBEDDING = "lm_head", "model.embed_tokens.weight"


def module_shapes(source: ModelSource) -> dict[str, tuple[int, int]]:
    """``[out, in]`` of every module a rule may name: the decoder blocks' linears, routers included, and the head.

    A tied head has the embedding's shape; compressing it unties it.
    """
    depth = block_count(source.config)
    shapes: dict[str, tuple[int, int]] = {}
    for name, info in source.tensors.items():
        module = name.removesuffix(".weight")
        index = layer_index(name)
        inside = index is not None and index < depth
        if module != name and len(info.shape) == 2 and (inside or module == HEAD):
            shapes[module] = (info.shape[0], info.shape[1])
    if HEAD not in shapes and (embedding := source.tensors.get(EMBEDDING)) is not None:
        shapes[HEAD] = (embedding.shape[0], embedding.shape[1])
    return shapes


def resolve(variant: Variant, source: ModelSource) -> dict[str, Scheme]:
    """The scheme of each module that `variant` compresses; the others are absent.

    Compressed by default: the decoder blocks' linears but routers. `ignore` takes from them; a rule may name any
    module of `module_shapes` and wins over both; of several rules that match a module the last one decides. Where a
    format cannot hold rows of a module's length, the module gets the one that takes its place; without any it is left.
    """
    shapes = module_shapes(source)
    schemes = {}
    for module, scheme in wanted(variant, source).items():
        fitting = scheme.format.for_width(shapes[module][1])
        if fitting is not None:
            schemes[module] = scheme if fitting is scheme.format else replace(scheme, format=fitting)
    return schemes


def wanted(variant: Variant, source: ModelSource) -> dict[str, Scheme]:
    """As `resolve`, with the formats that were asked for."""
    if not variant.compresses_weights:
        return {}
    default = set(linear_names(source.tensors, source.config))
    formats: dict[str, Format] = {}
    mix = PRESETS[variant.preset].get("mix") if variant.preset is not None and not variant.format else None
    if mix is not None:
        if f"{HEAD}.weight" in source.tensors:
            default.add(HEAD)
        named = mixed_formats(mix, default, source.config)
        formats = {module: format_from_dict({"name": name}) for module, name in named.items()}
    of_rule = [variant.scheme_of(rule) for rule in variant.rules]
    schemes: dict[str, Scheme] = {}
    for module in module_shapes(source):
        matching = [scheme for rule, scheme in zip(variant.rules, of_rule, strict=True) if match(rule.match, module)]
        if matching:
            schemes[module] = matching[-1]
        elif module in default and not any(match(pattern, module) for pattern in variant.ignore):
            scheme = variant.scheme
            schemes[module] = replace(scheme, format=formats[module]) if module in formats else scheme
    return schemes


def replaced(variant: Variant, source: ModelSource) -> list[str]:
    """What `resolve` could not give as it was asked for, in sentences; one for each pair of formats."""
    given, shapes = resolve(variant, source), module_shapes(source)
    pairs: dict[tuple[str, str | None], list[str]] = {}
    for module, scheme in wanted(variant, source).items():
        instead = given[module].format.name if module in given else None
        if instead != scheme.format.name:
            pairs.setdefault((scheme.format.name, instead), []).append(module)
    return [
        f"{len(modules)} modules are {f'in {instead}' if instead else 'left uncompressed'} instead of {asked}, whose "
        f"blocks do not divide their rows of {', '.join(str(n) for n in sorted({shapes[m][1] for m in modules}))}."
        for (asked, instead), modules in pairs.items()
    ]
