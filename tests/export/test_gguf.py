"""GGUF export: exact where it claims to be, measured where not, refused where it cannot."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench.errors import QbenchError
from qbench.export.gguf import check, check_tokenizer, read, write
from qbench.formats.base import FORMATS, Format, QuantizedTensor
from qbench.formats.codebook import NF4
from qbench.formats.gguf_blocks import KINDS
from qbench.formats.integer import Integer
from qbench.models.gguf_names import to_gguf
from qbench.models.gguf_rope import llama3_factors
from qbench.models.source import ModelSource, open_model
from qbench.scheme import Scheme
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.export.quantized import QuantizedSource
from tests.tiny import make_tiny_llama

V_PROJ = "model.layers.1.self_attn.v_proj.weight"  # rows in the same order in both worlds


def quantized(folder: Path, format: Format, **options: Any) -> QuantizedSource:
    return QuantizedSource(open_model(folder), lambda name: format, **options)


def as_gguf_py_sees(path: Path) -> dict[str, Any]:
    """Every tensor's values, read and dequantized by gguf-py."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


def types(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


EXACT = [
    (Integer(4, "group", 32), "Q4_0"),
    (Integer(4, "group", 64, full_range=False), "Q4_0"),
    (Integer(3, "group", 32), "Q4_0"),
    (Integer(2, "channel"), "Q4_0"),
    (Integer(4, "tensor"), "Q4_0"),
    (Integer(4, "group", 96), "Q4_0"),
    (Integer(8, "group", 32), "Q8_0"),
    (Integer(8, "channel", full_range=False), "Q8_0"),
    (Integer(5, "group", 128), "Q8_0"),
]


@pytest.mark.parametrize(("format", "kind"), EXACT)
def test_symmetric_codes_are_stored_exactly(tmp_path: Path, tiny_llama: Path, format: Integer, kind: str) -> None:
    source = quantized(tiny_llama, format)
    report = write(source, tmp_path)
    path = tmp_path / "model.gguf"
    assert report.files == [path]
    assert report.tensor_types == {kind: 21, "F16": 2, "F32": 7}
    seen, exported = as_gguf_py_sees(path), read(path)
    for name in source.tensors:
        ours = source.load(name)
        if isinstance(ours, torch.Tensor):
            continue
        assert torch.equal(exported.load(name), ours.dequantize())
        if name == V_PROJ:
            np.testing.assert_array_equal(seen[str(to_gguf(name))], ours.dequantize().numpy())
    assert not any("Quantized" in note for note in report.notes)


def test_zero_points_are_stored_up_to_the_rounding_of_the_minimum(tmp_path: Path, tiny_llama: Path) -> None:
    source = quantized(tiny_llama, Integer(4, "group", 32, symmetric=False))
    report = write(source, tmp_path)
    ours = source.load(V_PROJ)
    assert not isinstance(ours, torch.Tensor)
    seen = torch.from_numpy(as_gguf_py_sees(tmp_path / "model.gguf")[str(to_gguf(V_PROJ))])
    scale = ours.parts["scale"].double()
    minimum = scale * ours.parts["zero_point"].double()
    bound = (minimum * 2**-11).repeat_interleave(32, 1)  # half a step of float16's 11 bits
    difference = (seen.double() - ours.dequantize().double()).abs()
    assert bool((difference <= bound + 1e-7).all())
    assert 0 < difference.max() <= report.max_abs_difference
    assert types(tmp_path / "model.gguf")[str(to_gguf(V_PROJ))] == "Q4_1"
    assert any(note.startswith("Quantized weights read back with a difference of up to") for note in report.notes)


def test_float32_scales_are_rounded_and_reported(tmp_path: Path, tiny_llama: Path) -> None:
    source = quantized(tiny_llama, Integer(8, "channel", scale_dtype="float32"))
    report = write(source, tmp_path)
    exported = read(tmp_path / "model.gguf")
    largest = 0.0
    for name in source.tensors:
        ours = source.load(name)
        ours = ours if isinstance(ours, torch.Tensor) else ours.dequantize()
        difference = float((exported.load(name).float() - ours).abs().max())
        largest = max(largest, difference)
    assert report.max_abs_difference == largest > 0
    assert not report.exact
    assert any("Quantized" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_explicit_types_round_as_gguf_py_does(tmp_path: Path, tiny_llama: Path, kind: str) -> None:
    source = open_model(tiny_llama)
    report = write(source, tmp_path / "m.gguf", type=kind)
    weight = source.load(V_PROJ)
    assert isinstance(weight, torch.Tensor)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    ggml_type = gguf.GGMLQuantizationType[kind.upper()]
    np.testing.assert_array_equal(tensors[str(to_gguf(V_PROJ))].data, gguf.quants.quantize(weight.numpy(), ggml_type))
    assert report.tensor_types == {kind.upper(): 21, "F16": 2, "F32": 7}


def test_report_counts_file_bytes(tmp_path: Path, tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    report = write(source, tmp_path, type="f16")
    weights = sum(load_file(tiny_llama / "model.safetensors")[name].numel() for name in source.tensors)
    assert report.nbytes == (tmp_path / "model.gguf").stat().st_size
    assert report.bits_per_weight == 8 * report.nbytes / weights
    assert json.loads(json.dumps(report.to_dict()))["exact"] is False  # float32 weights became float16


def test_float16_model_reads_back_exactly(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path / "m", dtype=torch.float16))
    report = write(source, tmp_path)
    assert report.exact
    assert (report.max_abs_difference, report.worst_tensor) == (0.0, None)


def test_equal_sources_give_equal_bytes(tmp_path: Path, tiny_llama: Path) -> None:
    for name in ("a", "b"):
        write(quantized(tiny_llama, Integer(4, "group", 32)), tmp_path / f"{name}.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.trap(36)
def test_vectors_are_float32(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path / "m", dtype=torch.bfloat16, attention_bias=True))
    write(source, tmp_path, type="q4_0")
    found = types(tmp_path / "model.gguf")
    for name, info in source.tensors.items():
        assert (found[str(to_gguf(name))] == "F32") == (len(info.shape) == 1)


@pytest.mark.trap(37)
def test_rows_that_fit_no_block_are_float16_and_counted(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", intermediate_size=80)
    for source, kind in ((open_model(folder), "q4_0"), (quantized(folder, Integer(4, "group", 32)), "auto")):
        report = write(source, tmp_path / f"{kind}.gguf", type=kind)
        assert report.tensor_types == {"Q4_0": 18, "F16": 5, "F32": 7}
        assert any(note.startswith("3 linears are F16") and "down_proj" in note for note in report.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_block_formats_are_stored_byte_for_byte(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_llama(tmp_path / "m", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    source = quantized(folder, FORMATS.get(kind.lower())())
    report = write(source, tmp_path)
    assert report.tensor_types[kind] == 7
    assert report.quantized_max_abs_difference == 0
    name = "model.layers.0.self_attn.v_proj.weight"
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}["blk.0.attn_v.weight"]
    expected = source.load(name)
    assert isinstance(expected, QuantizedTensor)
    assert stored.data.tobytes() == expected.parts["blocks"].numpy().tobytes()
    explicit = write(open_model(folder), tmp_path / "explicit.gguf", type=kind.lower())
    assert explicit.tensor_types == report.tensor_types


@pytest.mark.trap(37)
def test_k_quants_of_short_rows_are_replaced_and_counted(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", intermediate_size=256)
    for asked, kind, instead in (("q4_k", "Q4_K", "Q5_0"), ("q6_k", "Q6_K", "Q8_0"), ("q5_k", "Q5_K", "Q5_1")):
        report = write(open_model(folder), tmp_path / f"{asked}.gguf", type=asked)
        assert report.tensor_types == {kind: 3, instead: 18, "F16": 2, "F32": 7}
        assert report.nbytes == (tmp_path / f"{asked}.gguf").stat().st_size
        weights = sum(prod(info.shape) for info in open_model(folder).tensors.values())
        assert report.bits_per_weight == 8 * report.nbytes / weights
        assert any(note.startswith(f"18 linears are {instead}") for note in report.notes)


@pytest.mark.trap(6)
def test_head_dim_is_stated(tmp_path: Path) -> None:
    write(open_model(make_tiny_llama(tmp_path / "m", head_dim=32)), tmp_path)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert fields[f"llama.{key}"].contents() == 32


def test_metadata(tmp_path: Path, tiny_llama: Path) -> None:
    write(quantized(tiny_llama, Integer(4, "group", 32)), tmp_path)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.name": tiny_llama.name,
        "general.file_type": 2,
        "general.quantization_version": 2,
        "general.alignment": 32,
        "llama.block_count": 3,
        "llama.attention.head_count_kv": 2,
        "llama.vocab_size": 300,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: fields[key] for key in expected} == expected
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert "<|im_start|>" in fields["tokenizer.chat_template"]


@pytest.mark.trap(40)
def test_rows_without_a_token_become_unused_placeholders(tmp_path: Path) -> None:
    write(open_model(make_tiny_llama(tmp_path / "m", vocab_size=320)), tmp_path)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    assert len(tokens) == len(set(tokens)) == 320
    assert [i for i, kind in enumerate(kinds) if kind == 5] == list(range(300, 320))


@pytest.mark.trap(40)
def test_more_tokens_than_rows_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", vocab_size=290)
    (folder / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    with pytest.raises(QbenchError, match="300 tokens, the embedding only 290 rows"):
        write(open_model(folder), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.trap(43)
def test_llama3_rope_factors() -> None:
    factors = llama3_factors(LLAMA3, 500000.0, 64).tolist()
    assert factors == pytest.approx([1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14, abs=5e-5)


@pytest.mark.trap(43)
@pytest.mark.parametrize(
    "rope", [LLAMA3, {**LLAMA3, "factor": 8.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}]
)
def test_rope_scaling_comes_back(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = make_tiny_llama(tmp_path / "m", rope_parameters=rope, head_dim=64, max_position_embeddings=131072)
    write(open_model(folder), tmp_path)
    assert read(tmp_path / "model.gguf").config["rope_parameters"] == rope


def change_config(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.trap(43)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "phi3"}, "model_type 'phi3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_networks_that_cannot_be_described_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    source = open_model(change_config(make_tiny_llama(tmp_path / "m"), **fields))
    with pytest.raises(QbenchError, match=message):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(QbenchError, match=message):
        check({}, {}, source.config)


def test_sliding_window_is_noted(tmp_path: Path) -> None:
    folder = change_config(make_tiny_llama(tmp_path / "m"), model_type="mistral", sliding_window=64)
    report = write(open_model(folder), tmp_path)
    assert any("sliding window of 64" in note for note in report.warnings)


REFUSED = [
    (NF4(64), "format nf4 has no GGUF block type"),
    (Integer(8, "channel", symmetric=False), "8 bits with zero points"),
    (Integer(4, "group", 16), "groups of 16"),
    (Integer(4, "group", 48), "groups of 48"),
    (Integer(4, "group", 32, symmetric=False, zero_point_dtype="float16"), "zero_point_dtype float16"),
]


@pytest.mark.parametrize(("format", "message"), REFUSED)
def test_formats_without_a_block_type_are_refused(
    tmp_path: Path, tiny_llama: Path, format: Format, message: str
) -> None:
    with pytest.raises(QbenchError, match=message) as caught:
        write(quantized(tiny_llama, format), tmp_path)
    assert "model.layers.0" in str(caught.value)
    assert not list(tmp_path.iterdir())
    module = "model.layers.0.mlp.up_proj"
    schemes, shapes = {module: Scheme(format, Nearest())}, {module: (128, 64)}
    config = open_model(tiny_llama).config
    with pytest.raises(QbenchError, match=message) as caught:
        check(schemes, shapes, config)
    assert module in str(caught.value)
    assert "type: q8_0" in str(caught.value)
    check(schemes, shapes, config, type="q8_0")
    write(quantized(tiny_llama, format), tmp_path, type="q8_0")


def test_scattered_groups_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    format = Integer(4, "group", 32)
    with pytest.raises(QbenchError, match="act_order: static"):
        write(quantized(tiny_llama, format, act_order=True), tmp_path)
    module = "model.layers.0.mlp.up_proj"
    with pytest.raises(QbenchError, match="act_order dynamic"):
        check({module: Scheme(format, GPTQ(act_order="dynamic"))}, {module: (128, 64)}, open_model(tiny_llama).config)
    write(quantized(tiny_llama, format, act_order=True), tmp_path, type="q4_0")


def test_unknown_type_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(QbenchError, match="Unknown GGUF type 'q4_k_m'"):
        write(open_model(tiny_llama), tmp_path, type="q4_k_m")


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors[V_PROJ][0, 0] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QbenchError, match=r"layers\.1\.self_attn\.v_proj\.weight.*does not fit float16"):
        write(open_model(folder), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.trap(39)
def test_pre_tokenizer_is_never_guessed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(QbenchError, match="a pre_tokenizer to choose"):
        write(open_model(folder), tmp_path / "a.gguf")
    with pytest.raises(QbenchError, match="a pre_tokenizer to choose"):
        check_tokenizer(open_model(folder))
    with pytest.raises(QbenchError, match="Unknown pre-tokenizer 'gpt2'"):
        write(open_model(folder), tmp_path / "a.gguf", pre_tokenizer="gpt2")
    report = write(open_model(folder), tmp_path / "a.gguf", pre_tokenizer="qwen2")
    assert any("given as 'qwen2'" in note for note in report.warnings)
    assert read(tmp_path / "a.gguf").file.metadata["tokenizer.ggml.pre"] == "qwen2"


def test_exporting_a_gguf_source_again_keeps_it(tmp_path: Path, tiny_llama: Path) -> None:
    write(quantized(tiny_llama, Integer(4, "group", 32)), tmp_path / "first.gguf")
    first: ModelSource = read(tmp_path / "first.gguf")
    report = write(first, tmp_path / "second.gguf", type="q4_0")
    assert set(report.tensor_types) == {"Q4_0", "F16", "F32"}
    second = read(tmp_path / "second.gguf")
    assert second.tokenizer.tokenizer_json() == read(tmp_path / "first.gguf").tokenizer.tokenizer_json()
    assert second.config == first.config


def test_encoders_cover_every_block_type_on_offer() -> None:
    from qbench.export.gguf_types import TYPES

    assert list(TYPES) == ["auto", "f16", *(kind.lower() for kind in KINDS)]
