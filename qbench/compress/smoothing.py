"""Transforms applied to one block: scales chosen group by group, folded in place, then clipping ranges.

Statistics come from the block in floating point on the hidden states that the quantized blocks before it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from qbench.calibration.channels import ChannelStatistics
from qbench.compress.experts import Expert
from qbench.compress.passes import Passes
from qbench.compress.solve import shared_parameters
from qbench.compress.trace import Reading, Trace, find_producer
from qbench.errors import QbenchError
from qbench.formats.activation import ActivationFormat
from qbench.scheme import Scheme
from qbench.transforms.base import Readers, Transform
from qbench.transforms.clipping import Limits, clip_search

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a module

SEARCH_TOKENS = 512  # on which candidates are compared; whole rows, at least one
UNREACHED = "no calibration token reached it"


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
        groups = [(reading, found) for reading in traced.shared() if (found := self._transforms(reading))]
        if groups:
            device = self.passes.hidden[0].device
            statistics = [
                ChannelStatistics(reading.tensor.shape[-1], self.passes.tokens, device, self._clipped(reading).values())
                for reading, _ in groups
            ]
            leaders: list[Any] = [self.block.get_submodule(reading.readers[0]) for reading, _ in groups]
            self.passes.collect(list(zip(leaders, statistics, strict=True)))
            calls = self._calls({_parent(reading.readers) for reading, _ in groups})
            scaled = [
                self._scale(traced, reading, transforms, seen, calls.get(_parent(reading.readers)))
                for (reading, transforms), seen in zip(groups, statistics, strict=True)
            ]
            for (reading, _), seen, scales in zip(groups, statistics, scaled, strict=True):  # when all are folded
                if seen.tokens:
                    for name, size in self._clipped(reading).items():
                        self._limit(name, seen.grams[size] if scales is None else _rescaled(seen.grams[size], scales))
        for name, scheme in self.schemes.items():
            if scheme.transform is not None and name not in self.done.detail:
                self.done.detail[name] = {"name": scheme.transform.name, "skipped": UNREACHED}
        return self.done

    def _transforms(self, reading: Reading) -> list[Transform]:
        """The different transforms that a group's linears ask for."""
        asked = (self.schemes[name].transform for name in reading.readers if name in self.schemes)
        return list(dict.fromkeys(transform for transform in asked if transform is not None))

    def _clipped(self, reading: Reading) -> dict[str, int]:
        """Those of a group's linears whose ranges are searched, each with the size of a block of its weight."""
        asked = {name: self.schemes[name] for name in reading.readers if name in self.schemes}
        return {
            name: scheme.format.block_size(reading.tensor.shape[-1])
            for name, scheme in asked.items()
            if scheme.transform is not None and scheme.transform.clips(name, scheme.format)
        }

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
        call: Call | None,
    ) -> torch.Tensor | None:
        """Chooses and folds one group's scales, and notes what was done.

        Without a `call`, no token of the search came by, and the group is one linear of an expert.
        """
        transform = transforms[0]
        if len(transforms) > 1:
            return self._skipped(reading, "linears that share its input ask for another transform")
        if call is None:
            if not seen.tokens or not len(seen.sample):
                return self._skipped(reading, UNREACHED)
            call = ((seen.sample,), {})
        producer = find_producer(self.block, traced, reading, self._judge(traced, reading))
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
            loss=self._loss(reading, call, seen.max_abs),
        )
        try:
            choice = transform.choose(readers)
        except QbenchError as refused:
            raise QbenchError(f"{self.prefix}.{reading.readers[0]}: {refused}") from refused
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

    def _judge(self, traced: Trace, reading: Reading) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """What shows whether folding changes nothing: a pass through the block, or an expert, which may get no token.

        It gives hidden states and what became of them.
        """
        name = _parent(reading.readers).rpartition(".")[0]
        expert: Any = self.block.get_submodule(name)
        if not isinstance(expert, Expert):
            return lambda: self.passes.first(1)
        tokens = next(
            r.rows_of for r in traced.readings if r.rows_of is not None and r.readers[0].startswith(f"{name}.")
        )
        return lambda: (torch.zeros_like(tokens), expert(tokens))

    def _skipped(self, reading: Reading, reason: str) -> torch.Tensor | None:
        """Notes why a group is left as it is."""
        for name in reading.readers:
            if name in self.schemes and (transform := self.schemes[name].transform) is not None:
                self.done.detail[name] = {"name": transform.name, "skipped": reason}
        return None

    def _loss(self, reading: Reading, call: Call, max_abs: torch.Tensor) -> Callable[[torch.Tensor], float]:
        """Scales -> mean squared error of what the module around the readers puts out, with their weights rounded.

        So are their inputs, where they will be; `max_abs` ``[n]`` is the largest magnitude of each.
        """
        parent = self.block.get_submodule(_parent(reading.readers))
        rounded: list[tuple[Any, Scheme]] = [
            (self.block.get_submodule(name), self.schemes[name]) for name in reading.readers if name in self.schemes
        ]
        originals = [linear.weight.data for linear, _ in rounded]
        formats = [scheme.format for _, scheme in rounded]

        def output() -> torch.Tensor:
            out = parent(*call[0], **call[1])
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first

        reference = output()

        def loss(scales: torch.Tensor) -> float:
            scaled = [weight * scales for weight in originals]
            try:
                shared = shared_parameters(formats, scaled, [None] * len(scaled))
                ready = zip(formats, scaled, shared, strict=True)
                found = [format.quantize(weight, shared=own).dequantize() for format, weight, own in ready]
            except QbenchError:  # a weight too large for the format under these scales
                return float("inf")
            hooks = []
            for (linear, scheme), weight in zip(rounded, found, strict=True):
                linear.weight.data = weight / scales
                if scheme.activation is not None:
                    hooks.append(linear.register_forward_pre_hook(rounds(scheme.activation, scales, max_abs)))
            error = float((output() - reference).square().mean())
            for (linear, _), weight in zip(rounded, originals, strict=True):
                linear.weight.data = weight
            for hook in hooks:
                hook.remove()
            return error

        return loss

    def _limit(self, name: str, gram: torch.Tensor) -> None:
        weight: Any = self.block.get_submodule(name).weight
        try:
            self.done.limits[name] = clip_search(weight.data, self.schemes[name].format, gram)
        except QbenchError as refused:
            raise QbenchError(f"{self.prefix}.{name}: {refused}") from refused


def _rescaled(gram: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`gram` ``[blocks, size, size]`` of inputs, as it is of the inputs divided by `scales` ``[n]``."""
    blocks, size = gram.shape[:2]
    factors = pad(1 / scales, (0, blocks * size - len(scales))).view(blocks, size)
    return gram * factors[:, :, None] * factors[:, None, :]


def rounds(activation: ActivationFormat, scales: torch.Tensor, max_abs: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A hook for a linear that rounds its input as if it had been divided by `scales` ``[n]`` before."""
    static = activation.input_scale((max_abs / scales).max()) if activation.static else None

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        smooth = (args[0] / scales).reshape(-1, len(scales))
        return activation.round(smooth, static).view_as(args[0]) * scales

    return hook


def _parent(names: list[str]) -> str:
    """The deepest module around all of `names`; a single one itself."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
