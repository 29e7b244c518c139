"""Which linears of a block read which tensor, and what makes that tensor: found by watching one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qbench.compress.experts import SplitExperts

POWERS = (0.25, 0.5, 1.0, 2.0, 4.0)  # scaling by them is exact in floating point
TOLERANCE = 1e-5  # of the block's change to the hidden states; what remains when a norm's weight is stored minus one


@dataclass
class Reading:
    """A tensor and the modules with a matrix that are given it, in execution order: linears, and routers of experts."""

    tensor: torch.Tensor
    readers: list[str]
    outputs_before: int  # how many modules had put out something when it was first read
    rows_of: torch.Tensor | None = None  # what it holds some rows of, when only some of the tokens go to an expert


@dataclass
class Trace:
    """One pass through a block, in which every expert is run."""

    readings: list[Reading] = field(default_factory=list)
    outputs: list[tuple[str, Any]] = field(default_factory=list)  # of modules with a weight, in order

    def shared(self) -> list[Reading]:
        """The readings with all that read the same channels together: a router, shared experts and every expert."""
        merged: list[Reading] = []
        for reading in self.readings:
            whole = reading.tensor if reading.rows_of is None else reading.rows_of
            known = next((known for known in merged if same(known.tensor, whole)), None)
            if known is None:
                merged.append(Reading(whole, list(reading.readers), reading.outputs_before))
            else:
                known.readers += reading.readers
        return merged


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, both alive, are one or views of one with the same channels."""
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.shape[-1] == other.shape[-1]
    )


def trace(block: nn.Module, run: Callable[[], torch.Tensor]) -> Trace:
    """What `run`, a pass through `block`, shows."""
    found = Trace()
    hooks = []
    known: set[str] = set()
    given: list[tuple[torch.Tensor, torch.Tensor]] = []  # what an expert is given, and the tensor whose rows these are

    def read(name: str, args: tuple[Any, ...]) -> None:
        if name in known or not args:
            return
        known.add(name)
        tensor = args[0]
        reading = next((reading for reading in found.readings if same(reading.tensor, tensor)), None)
        if reading is None:
            whole = next((whole for rows, whole in given if rows is tensor), None)
            found.readings.append(Reading(tensor, [name], len(found.outputs), whole))
        else:
            reading.readers.append(name)

    def run_all(experts: SplitExperts, args: tuple[torch.Tensor, ...]) -> None:
        """Tokens go to few experts, but scales must reach all."""
        for expert in experts:
            given.append((args[0][:1].clone(), args[0]))
            expert(given[-1][0])

    for name, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, SplitExperts):
            hooks.append(module.register_forward_pre_hook(run_all))
        if not isinstance(weight, torch.Tensor):
            continue
        if weight.ndim == 2:
            hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: read(name, args)))
        hooks.append(module.register_forward_hook(lambda _, args, out, name=name: found.outputs.append((name, out))))
    run()
    for hook in hooks:
        hook.remove()
    return found


def with_siblings(groups: Sequence[Sequence[str]], linears: Iterable[str]) -> list[list[str]]:
    """`groups` of linears in execution order, with groups of those `linears` whose siblings were traced.

    Siblings are modules of a list, such as experts, and run in its order: with ``experts.0.gate`` and
    ``experts.0.up`` in a group, ``experts.3.gate`` and ``experts.3.up`` are one, and come before ``experts.4``.
    """
    found = [list(group) for group in groups]
    traced = {name for group in groups for name in group}
    kinds = {_kind(name)[0]: [_kind(other)[0] for other in group] for group in groups for name in group}
    missing: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
    for name in linears:
        kind, numbers = _kind(name)
        if name not in traced and numbers and kind in kinds:
            missing.setdefault((tuple(kinds[kind]), numbers), []).append(name)
    order = {kind: position for position, kind in enumerate(kinds)}
    for (group_kinds, numbers), names in sorted(missing.items(), key=lambda item: (item[0][1], order[item[0][0][0]])):
        names.sort(key=lambda name: group_kinds.index(_kind(name)[0]))
        owner = group_kinds[0].partition("*")[0]
        siblings = [(place, _kind(group[0])[1]) for place, group in enumerate(found) if group[0].startswith(owner)]
        later = [place for place, of_sibling in siblings if of_sibling > numbers]
        found.insert(later[0] if later else siblings[-1][0] + 1, names)
    return found


def _kind(name: str) -> tuple[str, tuple[int, ...]]:
    """``experts.3.up`` as ``experts.*.up`` and its numbers."""
    parts = name.split(".")
    return ".".join("*" if part.isdigit() else part for part in parts), tuple(int(p) for p in parts if p.isdigit())


@dataclass(frozen=True)
class Producer:
    """A norm or linear whose last rows make the channels of a tensor, up to elementwise factors."""

    name: str
    module: nn.Module
    offset: float = 0.0  # 1 for norms that multiply by 1 + weight

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, float]]:
        """Weight and bias with the offset each is stored under."""
        for key, parameter in self.module.named_parameters(recurse=False):
            yield key, parameter, self.offset if key == "weight" else 0.0

    def divide(self, scales: torch.Tensor) -> list[str]:
        """Divides the last ``n`` rows by `scales` ``[n]``; the names of the parameters that changed."""
        n = len(scales)
        for _, parameter, offset in self.parameters():
            changed = parameter.data.clone()
            divisor = scales.reshape(-1, *[1] * (changed.ndim - 1))
            changed[-n:] = (changed[-n:] + offset) / divisor - offset
            parameter.data = changed
        return [f"{self.name}.{key}" for key, _, _ in self.parameters()]

    def largest(self, n: int) -> torch.Tensor:
        """``[n]``: the largest magnitude of weight or bias that makes each channel."""
        found = [(p.data[-n:] + offset).abs().reshape(n, -1).amax(1) for _, p, offset in self.parameters()]
        return torch.stack(found).amax(0)


def find_producer(
    block: nn.Module, found: Trace, reading: Reading, run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> Producer | None:
    """What `reading`'s scales can be folded into: tried with powers of two, which must leave the block's output as is.

    `run` gives hidden states and the block's output for them.

    A norm that puts out the tensor itself, or else a linear before it with at least as many rows, the latest first
    (``v_proj`` for ``o_proj``, ``up_proj`` for ``down_proj``; of a fused projection the last rows).
    """
    n = reading.tensor.shape[-1]
    readers = [block.get_submodule(name) for name in reading.readers]
    hidden, reference = run()
    exponent = torch.randint(len(POWERS), (n,), generator=torch.Generator().manual_seed(n))
    scales = torch.tensor(POWERS)[exponent].to(hidden)
    for producer in _candidates(block, found, reading, n):
        touched: list[Any] = [*readers, producer.module]
        before = [(p, p.data) for module in touched for p in module.parameters(recurse=False)]
        producer.divide(scales)
        for reader in readers:
            reader.weight.data = reader.weight.data * scales  # type: ignore[operator]
        difference = torch.linalg.norm(run()[1] - reference)
        for parameter, data in before:
            parameter.data = data
        if difference <= TOLERANCE * torch.linalg.norm(reference - hidden):
            return producer
    return None


def _candidates(block: nn.Module, found: Trace, reading: Reading, n: int) -> Iterator[Producer]:
    earlier = [(name, block.get_submodule(name), out) for name, out in found.outputs[: reading.outputs_before]]
    for name, module, out in reversed(earlier):
        if not isinstance(module, nn.Linear) and isinstance(out, torch.Tensor) and same(out, reading.tensor):
            yield Producer(name, module)
            yield Producer(name, module, offset=1.0)
            return
    for name, module, _ in reversed(earlier):
        if isinstance(module, nn.Linear) and module.out_features >= n and name not in reading.readers:
            yield Producer(name, module)
