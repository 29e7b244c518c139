"""Transforms applied to one block: scales chosen group by group, folded in place, then clipping ranges.

Statistics come from the block in floating point on the hidden states that the quantized blocks before it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qbench.calibration.channels import ChannelStatistics
from qbench.compress.passes import Passes
from qbench.compress.trace import Reading, Trace, find_producer
from qbench.scheme import Scheme
from qbench.transforms.base import Limits, Readers, Transform

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a module

SEARCH_TOKENS = 1024  # on which candidates are compared; whole rows, at least one


@dataclass
class Smoothed:
    """What was done to a block, by names inside it."""

    changed: set[str] = field(default_factory=set)  # parameters
    detail: dict[str, dict[str, Any]] = field(default_factory=dict)  # linear -> what its report says
    limits: dict[str, Limits] = field(default_factory=dict)  # linear -> bounds of its weight


class Smoother:
    """The transforms that `schemes` (linear -> scheme) ask of `block`."""

    def __init__(self, block: nn.Module, prefix: str, schemes: Mapping[str, Scheme], passes: Passes) -> None:
        self.block = block
        self.prefix = prefix
        self.schemes = schemes
        self.passes = passes
        self.done = Smoothed()

    def apply(self, traced: Trace) -> Smoothed:
        """Chooses and folds the scales of every group of `traced`, a pass over the first row, then finds limits."""
        groups = [(reading, found) for reading in traced.readings if (found := self._transforms(reading))]
        if groups:
            device = self.passes.hidden[0].device
            statistics = [
                ChannelStatistics(reading.tensor.shape[-1], self.passes.tokens, device) for reading, _ in groups
            ]
            leaders: list[Any] = [self.block.get_submodule(reading.readers[0]) for reading, _ in groups]
            self.passes.collect(list(zip(leaders, statistics, strict=True)))
            calls = self._calls({_parent(reading.readers) for reading, _ in groups})
            inputs = []
            for (reading, transforms), seen in zip(groups, statistics, strict=True):
                scales = self._scale(traced, reading, transforms, seen, calls[_parent(reading.readers)])
                inputs.append(seen.sample if scales is None else seen.sample / scales)
            for (reading, _), sample in zip(groups, inputs, strict=True):  # folding a later group changes weights too
                for name in reading.readers:
                    self._limit(name, sample)
        for name, scheme in self.schemes.items():
            if scheme.transform is not None and name not in self.done.detail:
                self.done.detail[name] = {"name": scheme.transform.name, "skipped": "no calibration token reached it"}
        return self.done

    def _transforms(self, reading: Reading) -> list[Transform]:
        """The different transforms that a group's linears ask for."""
        asked = (self.schemes[name].transform for name in reading.readers if name in self.schemes)
        return list(dict.fromkeys(transform for transform in asked if transform is not None))

    def _calls(self, parents: set[str]) -> dict[str, Call]:
        """What each of the modules is called with in a pass over the tokens that candidates are compared on."""
        calls = {}

        def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name] = (args, kwargs)

        hooks = [
            self.block.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
            )
            for name in sorted(parents)
        ]
        self.passes.first(SEARCH_TOKENS)
        for hook in hooks:
            hook.remove()
        return calls

    def _scale(
        self,
        traced: Trace,
        reading: Reading,
        transforms: list[Transform],
        seen: ChannelStatistics,
        call: Call,
    ) -> torch.Tensor | None:
        """Chooses and folds one group's scales, and notes what was done."""
        transform = transforms[0]
        if len(transforms) > 1:
            return self._skipped(reading, "linears that share its input ask for another transform")
        producer = find_producer(self.block, traced, reading, lambda: self.passes.first(1))
        if producer is None:
            return self._skipped(reading, "nothing takes the inverse scales without changing the block's output")
        if producer.is_linear and not transform.divides_linears:
            self.done.detail |= {name: {"name": transform.name} for name in reading.readers}
            return None
        linears: list[Any] = [self.block.get_submodule(name) for name in reading.readers]
        sizes = [
            self.schemes[name].format.block_size(reading.tensor.shape[-1])
            for name in reading.readers
            if name in self.schemes
        ]
        readers = Readers(
            mean_abs=seen.mean_abs(f"{self.prefix}.{reading.readers[0]}"),
            max_abs=seen.max_abs,
            weights=[linear.weight.data for linear in linears],
            block_size=sizes[0],
            largest_produced=producer.largest(reading.tensor.shape[-1]),
            loss=self._loss(reading, call),
        )
        choice = transform.choose(readers)
        if choice is None:
            return self._skipped(reading, "no scales that are finite and fit float16")
        self.done.changed |= {*producer.divide(choice.scales), *(f"{name}.weight" for name in reading.readers)}
        for linear in linears:
            linear.weight.data = linear.weight.data * choice.scales
        for name in reading.readers:
            self.done.detail[name] = {
                "name": transform.name,
                "folded_into": f"{self.prefix}.{producer.name}",
                **choice.detail,
            }
        return choice.scales

    def _skipped(self, reading: Reading, reason: str) -> torch.Tensor | None:
        """Notes why a group is left as it is."""
        for name in reading.readers:
            if name in self.schemes and (transform := self.schemes[name].transform) is not None:
                self.done.detail[name] = {"name": transform.name, "skipped": reason}
        return None

    def _loss(self, reading: Reading, call: Call) -> Callable[[torch.Tensor], float]:
        """Scales -> mean squared error of what the module around the readers puts out, with their weights rounded."""
        parent = self.block.get_submodule(_parent(reading.readers))
        rounded: list[tuple[Any, Scheme]] = [
            (self.block.get_submodule(name), self.schemes[name]) for name in reading.readers if name in self.schemes
        ]
        originals = [linear.weight.data for linear, _ in rounded]

        def output() -> torch.Tensor:
            out = parent(*call[0], **call[1])
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first

        reference = output()

        def loss(scales: torch.Tensor) -> float:
            for (linear, scheme), weight in zip(rounded, originals, strict=True):
                linear.weight.data = scheme.format.quantize(weight * scales).dequantize() / scales
            error = float((output() - reference).square().mean())
            for (linear, _), weight in zip(rounded, originals, strict=True):
                linear.weight.data = weight
            return error

        return loss

    def _limit(self, name: str, inputs: torch.Tensor) -> None:
        scheme = self.schemes.get(name)
        if scheme is None or scheme.transform is None:
            return
        weight: Any = self.block.get_submodule(name).weight
        limits = scheme.transform.limits(name, weight.data, scheme.format, inputs)
        if limits is not None:
            self.done.limits[name] = limits


def _parent(names: list[str]) -> str:
    """The deepest module around all of `names`; a single one itself."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
