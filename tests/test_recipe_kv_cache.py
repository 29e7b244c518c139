"""`kv_cache` in recipes: what is read, what is refused, and what a run makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench import measure
from qbench.commands.inspect import summary as summary_of
from qbench.commands.methods import known_methods
from qbench.errors import QbenchError
from qbench.formats.kv_cache import FP8KV, Int4KV, Int8KV
from qbench.inputs import reference_source
from qbench.models.source import open_model
from qbench.recipe import Recipe, load_recipe
from qbench.recipe_schema import json_schema
from qbench.report.run_info import RunInfo
from qbench.result import read_results
from qbench.validate import check
from qbench.workflow import run
from tests.tiny import make_tiny_llama


def recipe_for(folder: Path, model: Path | str, variants: dict[str, Any]) -> Recipe:
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 20)
    rows = {"data": str(text), "rows": 2, "seq_len": 32}
    benchmark = {"prompt_tokens": 8, "output_tokens": 4, "requests": 1, "concurrency": [1]}
    content = {"model": {"source": str(model)}, "calibration": rows, "evaluate": rows, "benchmark": benchmark}
    file = folder / "kv.yaml"
    file.write_text(yaml.safe_dump({**content, "variants": variants}))
    return load_recipe(file)


def refusal(folder: Path, variant: dict[str, Any]) -> str:
    with pytest.raises(QbenchError) as caught:
        recipe_for(folder, "some/model", {"x": variant})
    return str(caught.value)


def test_a_name_alone_or_with_fields(tmp_path: Path) -> None:
    variants = {
        "short": {"kv_cache": "fp8"},
        "long": {"kv_cache": {"name": "int4", "group_size": 16}},
        "both": {"preset": "nf4", "kv_cache": "int8"},
        "none": {"preset": "nf4", "kv_cache": "none"},
        "silent": {"preset": "nf4"},
    }
    recipe = recipe_for(tmp_path, "some/model", variants)
    formats = {name: variant.kv_format for name, variant in recipe.variants.items()}
    assert formats == {"short": FP8KV(), "long": Int4KV(group_size=16), "both": Int8KV(), "none": None, "silent": None}
    assert {n for n, variant in recipe.variants.items() if not variant.compresses_weights} == {"short", "long"}
    assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


def test_both_forms_fit_the_schema() -> None:
    import jsonschema

    schema = json.loads(json_schema())
    for said in ("fp8", {"name": "int4", "group_size": 16}, "none"):
        jsonschema.validate({"variants": {"x": {"kv_cache": said}}}, schema)
    for said in ("fp9", {"nam": "fp8"}, 8):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"variants": {"x": {"kv_cache": said}}}, schema)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"kv_cache": "fp9"}, "Unknown KV-cache format 'fp9'. Did you mean 'fp8'? Known: fp8, int4, int8."),
        ({"kv_cache": {"group_size": 16}}, "A KV-cache format needs a name. Known: fp8, int4, int8."),
        ({"kv_cache": {"name": "int8", "group": 16}}, "KV-cache format int8: unknown field 'group'"),
        ({"kv_cache": {"name": "int8", "group_size": 0}}, "KV-cache format int8: group_size is 0; allowed: 2 or more"),
        ({"kv_cache": 8}, "kv_cache"),
        ({"kv_cache": "none"}, "needs a preset or a format with a name"),
        (
            {"kv_cache": "fp8", "transform": {"name": "awq"}},
            "weights as they are; transform needs",
        ),
        ({"kv_cache": "fp8", "ignore": ["layers.0"]}, "weights as they are; ignore needs"),
        (
            {"kv_cache": "fp8", "export": [{"layout": "gguf"}]},
            "weights as they are; export needs",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, variant: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, variant)


def test_groups_that_do_not_divide_the_models_heads_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    recipe = recipe_for(tmp_path, model, {"x": {"kv_cache": "int4"}, "y": {"preset": "nf4", "kv_cache": "int4"}})
    with pytest.raises(QbenchError) as caught:
        check(recipe, reference_source(recipe), out=tmp_path)
    for name in ("x", "y"):
        why = "KV-cache format int4: group_size is 32, heads have 16 channels; allowed: 2, 4, 8, 16."
        assert f"variants.{name}.kv_cache: {why}" in str(caught.value)


def test_exports_are_told_to_hold_weights_only(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    gptq = {"preset": "gptq", "format": {"group_size": 32}, "kv_cache": "fp8", "export": [{"layout": "gptq"}]}
    recipe = recipe_for(tmp_path, model, {"x": gptq})
    plan = check(recipe, reference_source(recipe), out=tmp_path)
    assert "variants.x.export: layouts hold weights only, no KV-cache format." in plan.warnings


def test_methods_lists_the_formats() -> None:
    found = known_methods()["kv_cache"]
    assert list(found) == ["fp8", "int4", "int8"]
    assert found["int4"]["fields"] == {"group_size": "default 32", "symmetric": "default False"}
    assert all(entry["description"] for entry in found.values())


def test_a_variant_is_described_by_what_differs(tmp_path: Path) -> None:
    variants = {
        "a": {"kv_cache": {"name": "int4", "group_size": 16, "symmetric": True}},
        "b": {"preset": "nf4", "kv_cache": "int8"},
        "c": {"preset": "nf4", "kv_cache": "none"},
    }
    recipe = recipe_for(tmp_path, "some/model", variants).model_dump(mode="json", exclude_none=True)
    about = {"recipe_name": "kv", "recipe_hash": "", "model": "", "model_revision": "", "started": ""}
    info = RunInfo(recipe=recipe, **about)
    assert info.description("a") == "KV cache int4 group size 16 symmetric True"
    assert info.description("b") == "nf4, KV cache int8"
    assert info.description("c").startswith("4-bit codebook")


@pytest.mark.trap(30)
def test_a_run_calibrates_measures_and_tells_the_formats_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(job: measure.MeasureJob, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        measure._measure(job)

    monkeypatch.setattr("qbench.stages.run_job", in_this_process)
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=2)
    recipe = recipe_for(tmp_path, model, {"kv": {"kv_cache": "fp8"}})
    out = tmp_path / "out"
    summary = run(recipe, out)
    compressed = open_model(out / "variants" / "kv" / "model")
    assert compressed.kv_cache is not None
    assert compressed.kv_cache.format == FP8KV()
    assert len(compressed.kv_cache.scales) == 2
    rows = {(row.variant, row.metric): row for row in read_results(out / "results.jsonl") if not row.detail}
    for metric in ("perplexity", "kl_mean", "kv_token_bytes"):
        assert rows["reference", metric].provenance["kv_cache"] == "float32"
        assert rows["kv", metric].provenance["kv_cache"] == "fp8"
    assert rows["reference", "kv_token_bytes"].value == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, channels
    assert rows["kv", "kv_token_bytes"].value == 2 * 2 * 2 * 16
    assert rows["kv", "weight_bytes"].value == rows["reference", "weight_bytes"].value
    assert 0 < rows["kv", "kl_mean"].value < 0.1
    assert RunInfo.read(out).description("kv") == "KV cache fp8"
    assert "KV B / token" in summary.report.read_text()
    assert summary_of(compressed.location, 1)["kv_cache"] == {"name": "fp8"}
    assert run(recipe, out).reused == ["reference", "kv"]
