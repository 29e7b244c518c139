"""The README's commands run and what it shows is there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from qbench.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_runs(command: list[str]) -> None:
    """`make` targets are only planned (one of them is this test); `qbench` commands really run."""
    if command[0] == "make":
        subprocess.run(["make", "--dry-run", *command[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    from typer.testing import CliRunner

    from qbench.cli import app

    assert command[0] == ".venv/bin/qbench"
    result = CliRunner().invoke(app, [word.replace("recipes/", f"{ROOT}/recipes/") for word in command[1:]])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_recipe_is_valid(text: str) -> None:
    Recipe.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", blocks("python"))
def test_every_python_name_exists(text: str) -> None:
    import qbench

    for name in re.findall(r"qbench\.(\w+)", text):
        assert hasattr(qbench, name)


def test_every_link_and_picture_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_table_shows_what_the_quickstart_runs() -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    shown = {row.split("|")[1].strip(" *").split(" ")[0] for row in README.splitlines() if row.startswith("| ")}
    assert {"reference", *recipe["variants"]} <= shown
