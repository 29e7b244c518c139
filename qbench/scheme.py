"""What is done to one module: the format its weight is stored in and the solver that chooses the codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.formats.base import Format

if TYPE_CHECKING:
    from qbench.solvers.base import Solver


@dataclass(frozen=True)
class Scheme:
    """One module's compression."""

    format: Format
    solver: Solver
