"""What is done to one module: the format of its weight, the solver that chooses the codes, the transform before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.formats.base import Format

if TYPE_CHECKING:
    from qbench.solvers.base import Solver
    from qbench.transforms.base import Transform


@dataclass(frozen=True)
class Scheme:
    """One module's compression."""

    format: Format
    solver: Solver
    transform: Transform | None = None
