"""What is done to one module: the format of its weight, the solver that chooses the codes, the transform before
it, and how the module's input is rounded when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.formats.base import Format

if TYPE_CHECKING:
    from qbench.formats.activation import ActivationFormat
    from qbench.solvers.base import Solver
    from qbench.transforms.base import Transform
    from qbench.transforms.prune import Pruning


@dataclass(frozen=True)
class Scheme:
    """One module's compression."""

    format: Format
    solver: Solver
    transform: Transform | None = None
    prune: Pruning | None = None
    activation: ActivationFormat | None = None
