"""What is done to one module: the format of its weight, the solver that chooses the codes, the transform and the
pruning before it, and how the module's input is rounded when it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

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

    @property
    def uses_statistics(self) -> bool:
        """Whether the module's inputs decide its codes, so that the linears before it are solved first."""
        return self.solver.uses_hessian or (self.prune is not None and self.prune.uses_inputs)

    @property
    def sequential(self) -> bool:
        """Whether its inputs, as solved modules before it make them, decide its codes or a static scale of inputs."""
        return self.uses_statistics or (self.activation is not None and self.activation.static)

    @property
    def weighs_importance(self) -> bool:
        """Whether errors count by the importance of their input column, which an importance matrix may give."""
        return bool(getattr(self.solver, "importance", False))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for content keys."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part and part.to_dict() for name, part in parts.items()}
