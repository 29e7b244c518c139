"""`qbench doctor`: what this machine has and lacks."""

from __future__ import annotations

from rich.table import Table

from qbench.commands.common import Json, guarded, print_json, words


@guarded
def command(as_json: Json = False) -> None:
    """Shows versions, processor features, memory, disk, accelerators, optional packages and the cache folder.

    Examples:

        qbench doctor

        qbench doctor --json
    """
    from qbench.doctor import examine

    found = examine()
    if as_json:
        print_json({section: {row.what: row.found for row in rows} for section, rows in found.items()})
        return
    table = Table("", "found", "note")
    for section, rows in found.items():
        table.add_section()
        table.add_row(f"[bold]{section}[/bold]", "", "")
        for row in rows:
            table.add_row(row.what, row.found, row.note)
    words(as_json).print(table)
