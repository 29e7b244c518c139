"""Inputs of linears rounded while a block is compressed, as they will be rounded when the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qbench.errors import QbenchError
from qbench.formats.activation import INPUT_SCALE, ActivationFormat
from qbench.formats.base import QuantizedTensor

BORROWED = "no calibration token reached it; its input has the scale of its siblings'"


class Activations:
    """The linears of one block whose inputs are rounded: static scales, and hooks that round from then on.

    `largest` is what calibration saw: the largest magnitude of each linear's input, absent where no token came by.
    """

    def __init__(self, prefix: str, wanted: Mapping[str, ActivationFormat]) -> None:
        self.prefix, self.wanted = prefix, wanted
        self.largest: dict[str, torch.Tensor] = {}
        self.borrowed: set[str] = set()  # linears whose static scale is their siblings'
        self._hooks: list[Any] = []
        self._last: tuple[torch.Tensor, Any, torch.Tensor] | None = None  # linears that read one tensor: rounded once

    def start(self, name: str, linear: nn.Linear, largest: torch.Tensor | None) -> None:
        """Notes the linear's `largest` input and rounds its inputs in every later pass."""
        if largest is not None:
            self.largest[name] = largest
        activation = self.wanted.get(name)
        if activation is None or (activation.static and largest is None):
            return
        scale = self._scale(name, activation)
        how = (activation, None if scale is None else float(scale))

        def rounded(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            inputs = args[0]
            if self._last is None or self._last[0] is not inputs or self._last[1] != how:
                result = activation.round(inputs.detach().reshape(-1, inputs.shape[-1]), scale).view_as(inputs)
                if inputs.requires_grad:  # gradients pass as if nothing had been rounded
                    result = inputs + (result - inputs).detach()
                self._last = inputs, how, result
            return self._last[2], *args[1:]

        self._hooks.append(linear.register_forward_pre_hook(rounded))

    def stored(self, name: str, quantized: QuantizedTensor) -> QuantizedTensor:
        """`quantized` with its activation format and static scale."""
        activation = self.wanted.get(name)
        if activation is None:
            return quantized
        scale = self._scale(name, activation)
        parts = quantized.parts if scale is None else {**quantized.parts, INPUT_SCALE: scale.cpu()}
        return replace(quantized, parts=parts, activation=activation)

    def end(self) -> None:
        """Stops rounding."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last = None

    def _scale(self, name: str, activation: ActivationFormat) -> torch.Tensor | None:
        """The static scale. An expert that no token reached gets the largest of its siblings'."""
        if not activation.static:
            return None
        largest = self.largest.get(name)
        if largest is None:
            kind = name.rpartition(".")[2]
            siblings = [seen for other, seen in self.largest.items() if other.rpartition(".")[2] == kind]
            if not siblings:
                raise QbenchError(
                    f"{self.prefix}.{name}: no calibration token reached it, so activation format {activation.name} "
                    "has no scale for its input. Allowed: more calibration rows, or a format without a static scale."
                )
            largest = torch.stack(siblings).max()
            self.borrowed.add(name)
        try:
            return activation.input_scale(largest)
        except QbenchError as error:
            raise QbenchError(f"{self.prefix}.{name}: activation format {activation.name}: {error}") from error
