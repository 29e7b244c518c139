"""What a recipe may ask of another library, and what it is told when it cannot have it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qbench.errors import QbenchError
from qbench.inputs import reference_source
from qbench.models.source import open_model
from qbench.peers.choice import check_widths, read_choice
from qbench.peers.methods import PEERS
from qbench.recipe import Recipe
from qbench.validate import check

METHODS = [(name, method) for name in PEERS.names() for method in PEERS.get(name).methods.names()]


def recipe(model: Path, asked: Any) -> Recipe:
    return Recipe.model_validate(
        {"name": "r", "model": {"source": str(model)}, "variants": {"theirs": {"with": asked}}, "benchmark": None}
    )


@pytest.mark.parametrize(("library", "method"), METHODS)
def test_every_method_has_a_worker_defaults_and_nominal_bits(library: str, method: str) -> None:
    choice = read_choice({"library": library, "method": method})
    assert (Path(sys.modules["qbench.peers"].__path__[0]) / f"{choice.library.worker}.py").is_file()
    assert choice.nominal_bits in (4, 8)
    assert read_choice(choice.to_dict()).to_dict() == choice.to_dict()


def test_the_recipe_keeps_what_was_asked_with_every_default(tiny_llama: Path) -> None:
    made = recipe(tiny_llama, {"library": "gptqmodel", "group_size": 32, "python": "/some/python"})
    again = Recipe.model_validate(made.model_dump(mode="json"))
    assert again.hash == made.hash
    choice = again.variants["theirs"].choice
    assert choice is not None
    assert (choice.method, choice.interpreter) == ("gptq", "/some/python")
    assert choice.options["group_size"] == 32
    assert choice.options["sym"] is True


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("gptqmode", "Did you mean 'gptqmodel'?"),
        (3, "expected a library's name or a mapping"),
        ({"method": "gptq"}, "Unknown library None"),
        ({"library": "modelopt", "method": "int4"}, "Unknown method of modelopt 'int4'"),
        ({"library": "gptqmodel", "bit": 4}, "unknown field 'bit'. Did you mean 'bits'?"),
        ({"library": "gptqmodel", "bits": 5}, "bits is 5; allowed: 2, 3, 4, 8"),
        ({"library": "gptqmodel", "desc_act": True, "act_group_aware": True}, "exclude each other"),
        ({"library": "gptqmodel", "python": 3}, "allowed: the path of an interpreter"),
    ],
)
def test_mistakes_are_named(tiny_llama: Path, asked: Any, told: str) -> None:
    with pytest.raises(ValueError, match="with") as caught:
        recipe(tiny_llama, asked)
    assert told in str(caught.value)


@pytest.mark.parametrize("beside", [{"preset": "gptq"}, {"rotate": True}, {"export": [{"layout": "gptq"}]}])
def test_nothing_of_ours_stands_beside_it(beside: dict[str, Any]) -> None:
    variants = {"theirs": {"with": "gptqmodel", **beside}}
    with pytest.raises(ValueError, match=f"{next(iter(beside))} is for qbench's own methods"):
        Recipe.model_validate({"name": "r", "model": {"source": "x"}, "variants": variants})


def test_a_library_that_is_not_installed_is_named_with_its_package_and_interpreter(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(tiny_llama, {"library": "autoawq", "q_group_size": 64})
    source = reference_source(asked)
    with pytest.raises(QbenchError) as caught:
        check(asked, source)
    told = str(caught.value)
    for part in ("variants.theirs.with", sys.executable, "no package autoawq", "QBENCH_PEER_PYTHON_AUTOAWQ"):
        assert part in told
    assert list(check(asked, source, machine=False).estimates) == ["reference", "theirs"]
    monkeypatch.setenv("QBENCH_PEER_PYTHON_AUTOAWQ", "/bin/true")  # ends well whatever it is asked
    with pytest.raises(QbenchError, match="autoawq is not installed: /bin/true has no package"):
        check(asked, source)
    monkeypatch.setenv("QBENCH_PEER_PYTHON_AUTOAWQ", "/no/such/python")
    with pytest.raises(QbenchError, match="/no/such/python cannot be run: No such file"):
        check(asked, source)


def test_groups_must_divide_the_rows(tiny_llama: Path) -> None:
    asked = recipe(tiny_llama, "gptqmodel")
    with pytest.raises(QbenchError, match=r"groups of 128 do not divide rows of 64, 128\. Allowed here: 16, 32, 64\."):
        check(asked, open_model(tiny_llama), machine=False)
    check_widths(read_choice({"library": "gptqmodel", "group_size": -1}), {60})  # the whole row
    with pytest.raises(QbenchError, match=r"gptqmodel awq: group_size is -1; allowed: 1 or more\."):
        read_choice({"library": "gptqmodel", "method": "awq", "group_size": -1})  # its packing cannot
    check_widths(read_choice({"library": "bitsandbytes", "blocksize": 128}), {60})  # blocks of the flattened weight


@pytest.mark.parametrize(
    ("asked", "calibrates"),
    [
        ("gptqmodel", True),
        ("bitsandbytes", False),
        ("hqq", False),
        ("auto-round", True),
        ({"library": "auto-round", "method": "rtn"}, False),
        ({"library": "llmcompressor", "method": "rounding"}, False),
        ({"library": "llmcompressor", "method": "rounding", "scheme": "NVFP4"}, True),  # static scales of inputs
        ({"library": "modelopt", "method": "int4_awq"}, True),
        ({"library": "modelopt", "method": "nvfp4_weight_only"}, False),
    ],
)
def test_what_comes_from_weights_alone_is_known(asked: Any, calibrates: bool) -> None:
    assert read_choice(asked).calibrates is calibrates
