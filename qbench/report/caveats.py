"""What a reader must know before trusting a comparison, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.report.experts import expert_counts
from qbench.report.run_info import RunInfo
from qbench.report.table import Table
from qbench.result import Result

SENTENCES = {
    "solver_fallbacks": "{:.0f} layers were not solved as asked",
    "transforms_skipped": "the inputs of {:.0f} layers were not scaled",
}


def caveats(info: RunInfo, rows: Sequence[Result], table: Table) -> list[str]:
    """The run's own warnings, numbers not ranked, solver fallbacks, what exports lose or engines misread."""
    found = list(info.warnings)
    for column in table.columns:
        for variant in table.variants:
            cell = table.cells.get((variant, column.key))
            if cell and cell.differs:
                keys = ", ".join(cell.differs)
                found.append(f"{variant}: {column.title} was measured with another {keys} and is not ranked.")
    for row in rows:
        if row.metric in SENTENCES and (reason := row.detail.get("reason")) and row.variant in table.variants:
            found.append(f"{row.variant}: {SENTENCES[row.metric].format(row.value)}: {reason}.")
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
            if export.quantized_max_abs_difference:
                found.append(f"{variant} as {export.label}, read back: {export.difference}.")
            found += [f"{variant} as {export.label}: {warning}" for warning in export.warnings]
    return found
