"""Recipes: what is read, what is refused and in which words, inheritance, overrides, content keys."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.formats.integer import Integer
from qbench.presets import PRESETS, build_axis
from qbench.recipe import Recipe, Variant, load_recipe, stage_key
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from qbench.transforms.awq import AWQ
from qbench.transforms.prune import Wanda
from qbench.transforms.smoothquant import SmoothQuant

MODEL = "model: {source: some/model}\n"


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def load(folder: Path, variants: str, *overrides: str) -> Recipe:
    return load_recipe(write(folder, MODEL + f"variants: {variants}\n"), overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(QbenchError) as caught:
        load_recipe(write(folder, text), overrides)
    return str(caught.value)


def test_a_rotation_is_no_transform_and_the_message_says_where_it_is() -> None:
    with pytest.raises(ValueError, match="`rotate: true` in the variant asks for it"):
        Variant.model_validate({"preset": "gptq", "transform": {"name": "hadamard"}})


def test_defaults_and_name_from_the_file(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: nf4}}")
    assert recipe.name == "a"
    assert (recipe.calibration.split, recipe.calibration.rows) == ("calibration", 32)
    assert recipe.evaluate is not None
    assert recipe.evaluate.split == "held-out"
    assert recipe.benchmark is not None


def test_null_leaves_a_stage_out(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MODEL + "variants: {x: {preset: nf4}}\nbenchmark: null\nevaluate:\n"))
    assert recipe.benchmark is None
    assert recipe.evaluate is None


def test_a_file_of_text_has_no_split(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: nf4}}", "calibration.data=mine.txt")
    assert recipe.calibration.split is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_fills_in_every_field_it_names(preset: str) -> None:
    for axis in ("format", "solver"):
        built = build_axis(axis, preset)
        assert built.to_dict().items() >= PRESETS[preset][axis].items()


def test_single_fields_override_the_preset(tmp_path: Path) -> None:
    variant = load(
        tmp_path, "{x: {preset: gptq, format: {bits: 3, group_size: 32}, solver: {act_order: none}}}"
    ).variants["x"]
    assert variant.scheme.format == Integer(bits=3, granularity="group", group_size=32)
    assert variant.scheme.solver == GPTQ(percdamp=0.01, act_order="none")


def test_another_format_name_starts_from_that_formats_own_fields(tmp_path: Path) -> None:
    variant = load(tmp_path, "{x: {preset: gptq, format: {name: nf4}}}").variants["x"]
    assert variant.scheme.format.to_dict() == {"name": "nf4", "group_size": 64, "double_quant": False}


def test_a_format_by_name_needs_no_preset_and_is_rounded_to_nearest(tmp_path: Path) -> None:
    scheme = load(tmp_path, "{x: {format: {name: fp8}}}").variants["x"].scheme
    assert scheme.format.name == "fp8"
    assert scheme.solver == Nearest()


def test_a_rule_overrides_the_variant(tmp_path: Path) -> None:
    variant = load(
        tmp_path,
        "{x: {preset: gptq, format: {group_size: 32}, rules: [{match: lm_head, format: {bits: 8},"
        " solver: {name: nearest}}]}}",
    ).variants["x"]
    assert variant.scheme_of(variant.rules[0]).format == Integer(bits=8, granularity="group", group_size=32)
    assert variant.scheme_of(variant.rules[0]).solver == Nearest()


def test_all_mistakes_are_reported_together_with_key_line_and_what_is_allowed(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "sed: 3\n"
        "model: {source: x, off_gird: true, dtype: fp32}\n"
        "calibration: {rows: 0}\n"
        "variants:\n"
        "  a: {preset: gtpq}\n"
        "  b: {preset: gptq, format: {bit: 3}, solver: {act_order: sttic}}\n"
        "  c: {preset: gptq, rules: [{match: x, format: {bits: 9}}, {match: 're:('}]}\n"
        "  d: {format: {bits: 3}}\n"
        "  e: {preset: nf4, export: [{layout: ggfu}, {layout: gptq, type: q4_0}]}\n"
        "  Reference: {preset: nf4}\n",
    )
    lines = message.splitlines()
    assert lines[0] == f"{tmp_path / 'a.yaml'}: {len(lines) - 1} mistakes"
    for expected in (
        f"sed ({tmp_path / 'a.yaml'}:1): unknown key. Did you mean 'seed'?",
        f"model.off_gird ({tmp_path / 'a.yaml'}:2): unknown key. Did you mean 'off_grid'?",
        "model.dtype (", "found 'fp32'; allowed: 'auto', 'float32', 'bfloat16' or 'float16'.",
        "calibration.rows (", "found 0; must be greater than or equal to 1.",
        "variants.a.preset (", "unknown preset 'gtpq'. Did you mean 'gptq'?",
        "variants.b.format (", "unknown field 'bit'. Did you mean 'bits'?",
        "variants.b.solver (", "act_order is 'sttic'; allowed: none, static, dynamic.",
        "variants.c.rules[1].match (", "is not a valid regular expression",
        "variants.d (", "needs a preset or a format with a name",
        "variants.e.export[0].layout (", "unknown layout 'ggfu'. Did you mean 'gguf'?",
        "variants.e.export[1] (", "type is for layout gguf; layout is gptq.",
        "variants.Reference (", "the name is reserved",
    ):  # fmt: skip
        assert expected in message


def test_a_rules_mistake_names_the_rule(tmp_path: Path) -> None:
    message = refusal(tmp_path, MODEL + "variants: {c: {preset: gptq, rules: [{match: x, format: {bits: 9}}]}}")
    assert "variants.c.rules" in message
    assert "[0].format: format int: bits is 9; allowed: 2 to 8." in message


def test_a_field_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, MODEL + "variants: {c: {preset: absmax-int8, format: {group_size: 32}}}")
    assert "group_size 32 has no effect" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("variants: {x: {preset: nf4}}\n", "model: is required."),
        (MODEL, "variants: is required."),
        (MODEL + "variants: {}\n", "variants"),
        (MODEL + "variants: {x: }\n", "expected a mapping"),
        (MODEL + "variants: {x: {preset: nf4}, X: {preset: fp8}}\n", "would share a folder"),
        (MODEL + "variants: {../x: {preset: nf4}}\n", "found '../x'"),
        (MODEL + "variants: {x: {preset: nf4, export: [{layout: gguf}, {layout: gguf}]}}\n", "asked for twice"),
        (
            MODEL + "variants: {x: {preset: nf4, export: [{layout: gguf, pre_tokenizer: qwn2}]}}\n",
            "Did you mean 'qwen2'",
        ),
        (MODEL + "variants: {x: {preset: nf4, export: [{layout: gptq, pre_tokenizer: qwen2}]}}\n", "for layout gguf"),
        (MODEL + "variants: {x: {preset: nf4}}\nseed: true\n", "seed"),
        ("- a\n- b\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
        (MODEL + "variants: {con: {preset: nf4}}\n", "'con' cannot be the name of a folder on Windows"),
        (MODEL + "variants: {x: {format: {name: [1]}}}\n", "Unknown format [1]"),
        (MODEL + "variants: {x: {preset: nf4, rules: [{match: ''}]}}\n", "must have at least 1 character"),
        (MODEL + "benchmark: {concurrency: [2, 2]}\nvariants: {x: {preset: nf4}}\n", "a value is given twice"),
        (MODEL + "variants: {x: {preset: nf4}}\n7: 1\n", "must be strings"),
        ("model: {source: ''}\nvariants: {x: {preset: nf4}}\n", "model.source"),
        ("", "expected a mapping"),
        ("a: 2001-13-45\n", "not valid YAML: month"),
        ("a: !!int x\n", "not valid YAML: invalid literal"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("model: &m {source: *m}\n", "an alias lies inside what it stands for"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
            "aliases",
        ),
        (MODEL + "extends: " + "x" * 999, "extends: no file"),
        (MODEL + 'extends: "a\\0b"', "extends: no file"),
        (MODEL + "benchmark: {requests: 1" + "0" * 30 + "}\nvariants: {x: {preset: nf4}}\n", "1000000000"),
        (MODEL + "when: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_keys_written_twice_are_refused_with_both_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, MODEL + "variants:\n  x: {preset: nf4}\n  x: {preset: fp8}\nmodel: {source: b}\n")
    assert f"{tmp_path / 'a.yaml'}:4: variants.x is written twice (first on line 3)." in message
    assert f"{tmp_path / 'a.yaml'}:5: model is written twice (first on line 1)." in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match=r"none\.yaml: cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_nested_aliases_do_not_explode(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: y}"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    message = refusal(tmp_path, "\n".join(lines) + "\n")
    assert "aliases make it more than" in message
    assert len(message) < 1000


def test_extends_merges_deeply_and_the_own_name_stays(tmp_path: Path) -> None:
    write(
        tmp_path, MODEL + "name: base\ncalibration: {rows: 8, seq_len: 64}\nvariants: {x: {preset: nf4}}\n", "b/b.yaml"
    )
    child = write(tmp_path, "extends: b/b.yaml\ncalibration: {rows: 4}\nvariants: {y: {preset: fp8}}\n", "child.yaml")
    recipe = load_recipe(child)
    assert recipe.name == "child"
    assert (recipe.calibration.rows, recipe.calibration.seq_len) == (4, 64)
    assert list(recipe.variants) == ["x", "y"]


def test_a_mistake_in_the_base_is_placed_in_the_base(tmp_path: Path) -> None:
    base = write(tmp_path, MODEL + "seeed: 3\n", "base.yaml")
    message = refusal(tmp_path, "extends: base.yaml\nvariants: {x: {preset: nf4}}\n")
    assert f"seeed ({base}:2): unknown key. Did you mean 'seed'?" in message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for content in (b"\xff\xfe\x00", b"name: a\x00b"):
        file.write_bytes(content)
        with pytest.raises(QbenchError, match=re.escape(str(file))):
            load_recipe(file)
    with pytest.raises(QbenchError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)
    file.write_text("\ufeff" + MODEL + "variants: {x: {preset: nf4}}\n", encoding="utf-8")
    assert list(load_recipe(file).variants) == ["x"]


def test_extends_in_a_circle_and_a_missing_base_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "goes round in a circle" in refusal(tmp_path, "extends: b.yaml\n")
    assert "no file" in refusal(tmp_path, "extends: c.yaml\n")
    assert "expected the path" in refusal(tmp_path, "extends: [b.yaml]\n")


def test_set_changes_one_value_read_as_yaml(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "{x: {preset: gptq, rules: [{match: q_proj, format: {bits: 8}}]}}",
        "variants.x.format.bits=3",
        "variants.x.rules.0.format.bits=5",
        "benchmark.concurrency=[1, 4]",
        "evaluate=null",
    )
    variant = recipe.variants["x"]
    assert variant.scheme.format.to_dict()["bits"] == 3
    assert variant.scheme_of(variant.rules[0]).format.to_dict()["bits"] == 5
    assert recipe.benchmark is not None
    assert recipe.benchmark.concurrency == [1, 4]
    assert recipe.evaluate is None


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    """A power of ten is a number without a point, and 2:4 is text, not 124."""
    recipe = load(
        tmp_path,
        "{x: {preset: gptq, solver: {percdamp: 5e-3}, prune: {name: wanda, pattern: 2:4}}}",
        "variants.x.format.group_size=0x20",
        "evaluate.seq_len=+64",
    )
    scheme = recipe.variants["x"].scheme
    assert scheme.solver == GPTQ(percdamp=0.005)
    assert scheme.prune == Wanda("2:4")
    assert scheme.format.to_dict()["group_size"] == 32
    assert recipe.evaluate is not None
    assert recipe.evaluate.seq_len == 64
    for text in ("010", "08"):
        assert "found" in refusal(tmp_path, MODEL + f"seed: {text}\nvariants: {{x: {{preset: nf4}}}}\n")


def test_what_a_preset_adds_can_be_taken_away_and_nothing_is_ignored(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: sparse24-int8}, y: {preset: sparse24-int8, prune: {name: none}}}")
    assert recipe.variants["x"].scheme.prune == Wanda("2:4")
    assert recipe.variants["y"].scheme.prune is None
    for axis, fields in (("prune", 'pattern: "2:4"'), ("transform", "alpha: 0.5")):
        message = refusal(tmp_path, MODEL + f"variants: {{x: {{preset: rtn, {axis}: {{{fields}}}}}}}\n")
        assert f"A {axis} needs a name." in message


def test_set_changes_only_one_of_two_values_shared_by_an_alias(tmp_path: Path) -> None:
    text = MODEL + "variants: {x: &x {preset: rtn, format: {bits: 4}}, y: *x}\n"
    recipe = load_recipe(write(tmp_path, text), ["variants.x.format.bits=3"])
    assert recipe.variants["x"].format["bits"] == 3
    assert recipe.variants["y"].format["bits"] == 4


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("variants.z.format.bits=3", "no variant 'z'"),
        ("evaluate.row=3", "evaluate.row (--set evaluate.row=3): unknown key. Did you mean 'rows'?"),
        ("colour=red", "colour (--set colour=red): unknown key."),
        ("seed.x=1", "seed holds 0, which has no keys"),
        ("variants.x.rules.0.match=a", "is a list of 0"),
        ("seed", "expected key=value"),
        ("seed=[", "not valid YAML"),
        ("seed=2001-13-45", "not valid YAML: month"),
        pytest.param("seed=" + "[" * 3000, "nested too deeply", id="deep"),
        ("extends=b.yaml", "extends can only be changed in the recipe itself"),
        ("seed=9223372036854775808", "must be less than 9223372036854775808"),
        ("seed=-1", "seed (--set seed=-1): found -1"),
    ],
)
def test_set_refuses_what_the_recipe_does_not_know(tmp_path: Path, assignment: str, expected: str) -> None:
    assert expected in refusal(tmp_path, MODEL + "seed: 0\nvariants: {x: {preset: nf4, rules: []}}\n", assignment)


def test_chosen_keeps_the_recipes_order_and_refuses_unknown_names(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: nf4}, y: {preset: fp8}}")
    assert recipe.chosen(["y", "x"]) == ["x", "y"]
    assert recipe.chosen(None) == ["x", "y"]
    with pytest.raises(QbenchError, match="no variant 'xx'"):
        recipe.chosen(["xx"])


def test_the_hash_depends_on_content_and_nothing_else(tmp_path: Path) -> None:
    first = load(tmp_path, "{x: {preset: nf4}}")
    spelled = load_recipe(write(tmp_path, "name: a\nseed: 0\nvariants:\n  x:\n    preset: nf4\n" + MODEL, "other.yaml"))
    assert first.hash == spelled.hash
    assert first.hash != load(tmp_path, "{x: {preset: nf4}}", "seed=1").hash


def test_a_recipe_survives_its_own_json(tmp_path: Path) -> None:
    recipe = load(tmp_path, "{x: {preset: gptq, rules: [{match: q_proj, format: {bits: 8}}]}}", "benchmark=null")
    assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


def test_stage_keys_tell_contents_apart() -> None:
    assert stage_key({"b": 1, "a": [2]}) == stage_key({"a": [2], "b": 1})
    assert stage_key("ab", "c") != stage_key("a", "bc")
    assert stage_key(1) != stage_key("1")
    assert stage_key(Integer(bits=4)) != stage_key(Integer(bits=3))
    with pytest.raises(ValueError, match="Out of range"):
        stage_key(float("nan"))
    with pytest.raises(TypeError, match="no canonical form"):
        stage_key(object())


def test_recipes_are_checked_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path, MODEL + "variants: {x: {preset: gptq, export: [{layout: gguf}]}}\n")
    code = (
        f"import sys; from qbench.recipe import load_recipe; load_recipe({str(file)!r}).variants['x'].scheme;"
        "import qbench.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_shipped_recipe_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").name == "quickstart"
    with pytest.raises(QbenchError, match="Did you mean 'quickstart'"):
        load_recipe("quikstart")


def test_a_transform_comes_from_the_preset_and_its_fields_may_be_changed(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "{x: {preset: awq, transform: {clip: false}}, y: {preset: gptq, transform: {name: smoothquant, alpha: search}},"
        " z: {preset: gptq, rotate: true}}",
    )
    assert recipe.variants["x"].scheme.transform == AWQ(clip=False)
    assert recipe.variants["y"].scheme.transform == SmoothQuant(alpha="search")
    assert recipe.variants["y"].scheme.solver == GPTQ()
    assert recipe.variants["z"].scheme.transform is None


def test_a_transform_that_does_not_exist_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, MODEL + "variants:\n  a: {preset: gptq, transform: {name: awk}}\n")
    assert "variants.a.transform" in message
    assert "awq" in message
