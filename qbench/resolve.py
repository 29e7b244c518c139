"""From a variant and a model to one scheme a module."""

from __future__ import annotations

from qbench.models.source import ModelSource
from qbench.models.structure import block_count, layer_index, linear_names, match
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
    module of `module_shapes` and wins over both; of several rules that match a module the last one decides.
    """
    default = set(linear_names(source.tensors, source.config))
    of_rule = [variant.scheme_of(rule) for rule in variant.rules]
    schemes: dict[str, Scheme] = {}
    for module in module_shapes(source):
        matching = [scheme for rule, scheme in zip(variant.rules, of_rule, strict=True) if match(rule.match, module)]
        if matching:
            schemes[module] = matching[-1]
        elif module in default and not any(match(pattern, module) for pattern in variant.ignore):
            schemes[module] = variant.scheme
    return schemes
