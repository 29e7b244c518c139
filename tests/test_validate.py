"""A recipe against a model's header: which modules get what, and what is refused before anything long starts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from rich.console import Console

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, format_from_dict
from qbench.formats.size import stored_bytes
from qbench.inputs import reference_source
from qbench.models.source import open_model
from qbench.presets import PRESETS
from qbench.recipe import Recipe, load_recipe
from qbench.resolve import module_shapes, resolve
from qbench.validate import Plan, check
from tests.families import make_family
from tests.tiny import make_tiny_llama

TEXT = "A line of text to calibrate on.\n" * 50


def recipe_for(folder: Path, model: Path, variants: dict[str, Any], *overrides: str) -> Recipe:
    text = folder / "text.txt"
    text.write_text(TEXT)
    (folder / "held-out.txt").write_text(TEXT)
    rows = {"data": str(text), "rows": 4, "seq_len": 32}
    held_out = rows | {"data": str(folder / "held-out.txt")}
    benchmark = {"prompt_tokens": 16, "output_tokens": 4}
    content = {"model": {"source": str(model)}, "calibration": rows, "evaluate": held_out, "benchmark": benchmark}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({**content, "variants": variants}))
    return load_recipe(file, overrides)


def plan_for(folder: Path, model: Path, variants: dict[str, Any], *overrides: str) -> Plan:
    recipe = recipe_for(folder, model, variants, *overrides)
    return check(recipe, reference_source(recipe), out=folder)


def refusal(folder: Path, model: Path, variants: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(QbenchError) as caught:
        plan_for(folder, model, variants, *overrides)
    return str(caught.value)


def test_block_linears_are_compressed_and_nothing_else(tmp_path: Path, tiny_llama: Path) -> None:
    schemes = plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}).schemes["x"]
    assert len(schemes) == 3 * 7
    assert all(".layers." in module and module.endswith("_proj") for module in schemes)


def test_ignore_adds_to_the_default_and_the_last_matching_rule_wins(tmp_path: Path, tiny_llama: Path) -> None:
    variant = {
        "preset": "rtn",
        "format": {"group_size": 32},
        "ignore": ["layers.0"],
        "rules": [
            {"match": "mlp.down_proj", "format": {"bits": 8}},
            {"match": "re:.*layers\\.[12]\\.mlp\\.down_proj", "format": {"bits": 6}},
            {"match": "lm_head", "format": {"name": "nf4"}},
        ],
    }
    schemes = plan_for(tmp_path, tiny_llama, {"x": variant}).schemes["x"]
    bits = {module: scheme.format.to_dict().get("bits") for module, scheme in schemes.items()}
    assert bits.pop("lm_head") is None
    assert bits.pop("model.layers.0.mlp.down_proj") == 8  # a rule wins over ignore
    assert bits.pop("model.layers.1.mlp.down_proj") == bits.pop("model.layers.2.mlp.down_proj") == 6
    assert set(bits.values()) == {4}
    assert not any(".layers.0." in module for module in bits)


def test_a_tied_head_may_be_named(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    source = open_model(model)
    assert "lm_head.weight" not in source.tensors
    recipe = recipe_for(tmp_path, model, {"x": {"preset": "nf4", "rules": [{"match": "lm_head"}]}})
    assert "lm_head" in resolve(recipe.variants["x"], source)
    assert module_shapes(source)["lm_head"] == (300, 64)


@pytest.mark.trap(2)
def test_a_rule_that_matches_no_module_is_refused_with_the_nearest(tmp_path: Path, tiny_llama: Path) -> None:
    message = refusal(
        tmp_path, tiny_llama, {"x": {"preset": "nf4", "rules": [{"match": "self_atn.q_proj"}, {"match": "layers.30"}]}}
    )
    assert "variants.x.rules[0].match: 'self_atn.q_proj' matches no module. Did you mean 'self_attn.q_proj'?" in message
    assert "variants.x.rules[1].match: 'layers.30' matches no module." in message


@pytest.mark.trap(2)
def test_an_ignore_that_matches_no_module_is_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    plan = plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4", "ignore": ["layers.1", "layers.10"]}})
    assert plan.warnings == ["variants.x.ignore[1]: 'layers.10' matches no module and has no effect."]


def test_calibrating_on_what_is_measured_is_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    same = {"data": str(tmp_path / "held-out.txt")}
    plan = plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}, "y": {"preset": "nf4", "calibration": same}})
    assert [warning.partition(" (")[0] for warning in plan.warnings] == [
        "variants.y: calibrated on the text it is measured on"
    ]


def test_importance_that_decides_nothing_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    weighed = {"preset": "fp8", "solver": {"importance": True}}
    with pytest.raises(QbenchError, match="importance changes nothing where no range is searched"):
        plan_for(tmp_path, tiny_llama, {"x": weighed})
    searched = {"preset": "rtn", "format": {"group_size": 32}, "solver": {"importance": True, "search": "mse"}}
    assert plan_for(tmp_path, tiny_llama, {"x": searched}).warnings == []


def test_ignoring_everything_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    assert "nothing would be compressed" in refusal(
        tmp_path, tiny_llama, {"x": {"preset": "nf4", "ignore": ["layers"]}}
    )


@pytest.mark.trap(3)
def test_a_partial_group_is_fine_until_a_layout_cannot_hold_it(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "192", hidden_size=192, intermediate_size=256, num_attention_heads=6)
    variant: dict[str, Any] = {"preset": "rtn"}
    assert plan_for(tmp_path, model, {"x": variant}).warnings == []
    message = refusal(tmp_path, model, {"x": {**variant, "export": [{"layout": "gptq"}]}})
    assert "variants.x.export[0]:" in message
    assert "128" in message
    assert "192" in message
    assert "64" in message  # a size that would fit
    plan_for(tmp_path, model, {"x": {**variant, "format": {"group_size": 64}, "export": [{"layout": "gptq"}]}})


def test_groups_wider_than_a_row_are_refused_before_any_work(tmp_path: Path, tiny_llama: Path) -> None:
    variants = {
        "rtn": {"preset": "rtn"},  # groups of 128; rows are 64 and 128 wide
        "nf4": {"preset": "nf4", "format": {"group_size": 4096}},
        "one": {"preset": "nf4", "rules": [{"match": "layers.1.self_attn.o_proj", "format": {"group_size": 65}}]},
    }
    message = refusal(tmp_path, tiny_llama, variants)
    width = "group_size is 128, rows are 64 wide; allowed: 2 to 64; model.layers.0.mlp.gate_proj and 17 more."
    assert f"variants.rtn.format: format int: {width}" in message
    assert "format nf4: group_size is 4096, rows are 128 wide" in message
    assert "variants.one.format: format nf4: group_size is 65" in message
    assert "model.layers.1.self_attn.o_proj." in message


def test_what_cannot_be_pruned_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    """Formats without a zero, also behind a name or in an export, and rows that the pattern does not divide."""
    half = {"name": "magnitude", "sparsity": 0.5}
    variants = {
        "minimums": {"preset": "q4_k", "prune": half},  # rows of 64 and 128 take q5_0, which has a zero
        "instead": {"preset": "q5_k", "prune": half},  # and these q5_1, which has none
        "hqq": {"preset": "hqq", "prune": half},
        "sevens": {"preset": "rtn", "prune": {"name": "wanda", "pattern": "3:7"}},
        "gguf": {
            "preset": "rtn",
            "format": {"symmetric": False, "group_size": 32},
            "prune": half,
            "export": [{"layout": "gguf"}, {"layout": "gptq"}, {"layout": "gguf", "type": "q8_0"}],
        },
    }
    message = refusal(tmp_path, tiny_llama, variants)
    assert "variants.minimums" not in message
    assert (
        "variants.instead.prune: format q5_1 has no exact zero, so pruned weights would come back; allowed: fp4"
        in message
    )
    assert "variants.hqq.prune: format int has no exact zero" in message
    assert "int with zero_point_dtype uint8" in message
    assert (
        "rows of 64 do not divide into groups of 7, as pattern 3:7 needs; model.layers.0.mlp.gate_proj and 17 more"
        in message
    )
    assert "variants.gguf.export[0]" in message
    assert "q4_1 has no exact zero" in message
    assert "export[1]" not in message
    assert "export[2]" not in message


def test_a_pre_tokenizer_that_gguf_has_no_name_for_takes_the_users_choice(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "m")
    described = json.loads((model / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}
    (model / "tokenizer.json").write_text(json.dumps(described))
    export: dict[str, Any] = {"layout": "gguf", "type": "f16"}
    message = refusal(tmp_path, model, {"x": {"preset": "nf4", "export": [export]}})
    assert "variants.x.export[0]: tokenizer.json" in message
    assert "Give the export a pre_tokenizer" in message
    plan_for(tmp_path, model, {"x": {"preset": "nf4", "export": [export | {"pre_tokenizer": "qwen2"}]}})


def test_gguf_cannot_hold_dynamic_groups_or_nf4(tmp_path: Path, tiny_llama: Path) -> None:
    gguf = [{"layout": "gguf"}]
    variants = {
        "dynamic": {"preset": "gptq", "format": {"group_size": 32}, "solver": {"act_order": "dynamic"}, "export": gguf},
        "nf4": {"preset": "nf4", "export": gguf},
    }
    message = refusal(tmp_path, tiny_llama, variants)
    assert "variants.dynamic.export[0]" in message
    assert "act_order" in message
    assert "variants.nf4.export[0]" in message
    plan_for(tmp_path, tiny_llama, {"nf4": {"preset": "nf4", "export": [{"layout": "gguf", "type": "f16"}]}})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("calibration.seq_len=513", "calibration.seq_len is 513; the model's positions end at 512."),
        ("evaluate.seq_len=513", "evaluate.seq_len is 513"),
        ("benchmark.prompt_tokens=509", "prompt and output tokens make 513"),
        ("calibration.data=nowhere.txt", "calibration: Data file nowhere.txt does not exist."),
        ("evaluate.data=wiki-paragraph", "evaluate: Unknown data 'wiki-paragraph'"),
        ("evaluate={data: wiki-paragraphs, split: test}", "has no split 'test'"),
        ("variants.x.calibration={data: nowhere.jsonl}", "variants.x.calibration: Data file nowhere.jsonl does not"),
        ("variants.x.calibration={seq_len: 513}", "variants.x.calibration.seq_len is 513"),
    ],
)
def test_lengths_and_data_are_checked(tmp_path: Path, tiny_llama: Path, override: str, expected: str) -> None:
    assert expected in refusal(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, override)


def test_estimates_go_by_the_variants_own_calibration(tmp_path: Path, tiny_llama: Path) -> None:
    variant = {"preset": "gptq", "format": {"group_size": 32}}
    many = {**variant, "calibration": {"rows": 4000}}
    estimates = plan_for(tmp_path, tiny_llama, {"few": variant, "many": many}).estimates
    assert estimates["many"].seconds > 2 * estimates["few"].seconds
    assert estimates["many"].compress_memory > estimates["few"].compress_memory
    own = {**variant, "calibration": {"data": "self-generated", "rows": 4000}}
    writing = plan_for(tmp_path, tiny_llama, {"few": variant, "own": own, "same": own}).estimates["reference"]
    assert writing.seconds > 10 * estimates["reference"].seconds  # the text is written before the first variant


def test_conversations_need_a_chat_template(tmp_path: Path, tiny_llama: Path) -> None:
    data = "calibration={data: grade-school-math, rows: 2, seq_len: 32}"
    plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, data)
    model = tmp_path / "base"
    shutil.copytree(tiny_llama, model, ignore=shutil.ignore_patterns("chat_template*"))
    message = refusal(tmp_path, model, {"x": {"preset": "nf4"}}, data)
    assert "calibration: data grade-school-math holds conversations; the model has no chat template." in message


def test_a_model_that_the_runtime_cannot_run_writes_no_text(tmp_path: Path, tiny_llama: Path) -> None:
    data = ("calibration={data: self-generated, rows: 2, seq_len: 32}", "evaluate=null", "benchmark=null")
    plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, *data)
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "calibration: the model cannot write its own text: config.json" in refusal(
        tmp_path, model, {"x": {"preset": "nf4"}}, *data
    )
    assert "benchmark: prompts are cut from evaluate.data" in refusal(
        tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, *data[:2]
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"architectures": ["GPT2LMHeadModel"]}, "the model cannot be measured (evaluate, benchmark): config.json"),
        ({"num_hidden_layers": 4}, "config.json says 4 blocks; no tensor of block 3 is there."),
        ({"vocab_size": 301}, "config.json asks for [301, 64]"),
    ],
)
def test_a_model_that_could_not_be_measured_is_refused(
    tmp_path: Path, tiny_llama: Path, change: dict[str, Any], expected: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    assert expected in refusal(tmp_path, model, {"x": {"preset": "nf4"}})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": None}, "model_type is None, which transformers"),
        ({"model_type": "llamma"}, "model_type is 'llamma', which transformers"),
        ({"hidden_act": "swish2"}, "transformers cannot build the model that config.json describes (KeyError"),
        ({"num_attention_heads": 7}, "transformers cannot build the model that config.json describes ("),
    ],
)
def test_a_model_that_could_not_be_compressed_is_refused(
    tmp_path: Path, tiny_llama: Path, change: dict[str, Any], expected: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    assert expected in refusal(tmp_path, model, {"x": {"preset": "nf4"}}, "evaluate=null", "benchmark=null")


def test_what_is_no_linear_in_the_models_code_is_refused(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "mixtral")
    found = refusal(
        tmp_path, model, {"x": {"preset": "nf4", "rules": [{"match": "gate"}]}}, "evaluate=null", "benchmark=null"
    )
    assert "model.layers.0.block_sparse_moe.gate: a MixtralTopKRouter, not a linear layer" in found


def test_blocks_beyond_those_of_the_config_are_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    plan = plan_for(tmp_path, model, {"x": {"preset": "nf4"}}, "evaluate=null", "benchmark=null")
    assert "config.json says 2 blocks; 1 more are stored, from block 2 on" in " ".join(plan.warnings)


def test_rules_and_ignores_that_later_ones_overrule_are_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    rules = [{"match": "layers.0.mlp.*"}, {"match": "mlp.*"}, {"match": "layers.0.mlp.up_proj"}]
    variants = {"x": {"preset": "nf4", "ignore": ["layers.1.mlp.up_proj", "q_proj"], "rules": rules}}
    told = [line for line in plan_for(tmp_path, tiny_llama, variants).warnings if "no effect" in line]
    assert [line.split(":")[0] for line in told] == ["variants.x.rules[0]", "variants.x.ignore[0]"]


def test_a_gguf_type_that_rows_are_too_short_for_is_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    variants = {"x": {"preset": "nf4", "export": [{"layout": "gguf", "type": "q6_k"}]}}
    told = " ".join(plan_for(tmp_path, tiny_llama, variants).warnings)
    assert "variants.x.export[0]: 21 linears are Q8_0: their rows do not divide into the type's blocks" in told


def test_a_model_that_is_only_compressed_need_not_run(tmp_path: Path, tiny_llama: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    plan = plan_for(tmp_path, model, {"x": {"preset": "nf4"}}, "evaluate=null", "benchmark=null")
    assert plan.estimates["reference"].seconds == 0


def test_everything_wrong_is_reported_together(tmp_path: Path, tiny_llama: Path) -> None:
    rules = [{"match": "nothing"}]
    message = refusal(
        tmp_path, tiny_llama, {"x": {"preset": "nf4", "rules": rules}, "y": {"preset": "fp8", "rules": rules}},
        "evaluate.seq_len=9999",
    )  # fmt: skip
    assert len(message.splitlines()) == 4


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    message = refusal(tmp_path, tiny_llama, {"x": {"preset": "nf4"}})
    assert "on disk" in message
    assert str(tmp_path) in message


def test_memory_that_is_not_there_is_refused_and_not_free_is_warned_about(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=1000))
    plan = plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}})
    assert "GiB are free now" in plan.warnings[0]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1000))
    assert "of memory; the machine has" in refusal(tmp_path, tiny_llama, {"x": {"preset": "nf4"}})


def test_off_grid_of_a_model_on_no_grid_is_warned_about(tmp_path: Path, tiny_llama: Path) -> None:
    plan = plan_for(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, "model.off_grid=true")
    assert "lies on no known grid" in plan.warnings[0]


def test_estimates_follow_from_the_model(tmp_path: Path, tiny_llama: Path) -> None:
    plan = plan_for(tmp_path, tiny_llama, {"x": {"preset": "absmax-int8"}, "y": {"preset": "nf4"}})
    stored = sum(info.nbytes for info in open_model(tiny_llama).tensors.values())
    assert plan.estimates["reference"].weight_bytes == stored
    assert plan.estimates["x"].weight_bytes > plan.estimates["y"].weight_bytes
    assert plan.estimates["y"].bits_per_weight == pytest.approx(4.5)
    assert plan.memory > stored
    assert plan.seconds > 0
    printed = io.StringIO()
    plan.print(Console(file=printed, width=80))
    assert "In all about" in printed.getvalue()


@pytest.mark.parametrize("shape", [(6, 192), (5, 100), (1, 64)])
@pytest.mark.parametrize("preset", PRESETS)
def test_stored_bytes_equal_those_of_a_quantized_weight(preset: str, shape: tuple[int, int]) -> None:
    format = format_from_dict(PRESETS[preset]["format"]).for_width(shape[1])
    if format is None:  # rows that GGUF has no block for
        assert shape[1] % 32
        return
    assert stored_bytes(format, shape) == format.quantize(torch.randn(shape)).nbytes


def test_stored_bytes_count_a_tensors_one_scale_once() -> None:
    format = FORMATS.get("int")(bits=8, granularity="tensor", scale_dtype="float32")
    assert stored_bytes(format, (10, 64)) == 10 * 64 + 4
