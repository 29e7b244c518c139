"""What a reader must know before trusting a comparison, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.report.experts import expert_counts
from qbench.report.run_info import RunInfo
from qbench.report.table import Table
from qbench.result import Result


def caveats(info: RunInfo, rows: Sequence[Result], table: Table) -> list[str]:
    """The run's own warnings, numbers that were not ranked, solver fallbacks, exports that are not exact."""
    found = list(info.warnings)
    for column in table.columns:
        for variant in table.variants:
            cell = table.cells.get((variant, column.key))
            if cell and cell.differs:
                keys = ", ".join(cell.differs)
                found.append(f"{variant}: {column.title} was measured with another {keys} and is not ranked.")
    for row in rows:
        if row.metric == "solver_fallbacks" and row.value and row.variant in table.variants:
            found.append(f"{row.variant}: {row.value:.0f} layers fell back to plain rounding.")
        if row.metric == "transforms_skipped" and row.value and row.variant in table.variants:
            found.append(f"{row.variant}: the inputs of {row.value:.0f} layers could not be scaled.")
    for counts in expert_counts(rows, table.variants):
        if counts.num_unreached:
            share = f"{counts.num_unreached} of {len(counts.tokens)} experts"
            found.append(f"{counts.variant}: no calibration token reached {share}; these had their weights alone.")
    makers = {row.variant: row.provenance["made_by"] for row in rows if "made_by" in row.provenance}
    for variant, maker in makers.items():
        if variant in table.variants:
            found.append(f"{variant}: made by {maker}; its weights are floats here, so their speed is not given.")
    for variant, exports in info.exports.items():
        for export in exports:
            if export.difference:
                found.append(f"{variant} as {export.label}, read back: {export.difference}.")
    return found
