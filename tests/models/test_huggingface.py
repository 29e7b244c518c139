"""Folders and hub snapshots: values against safetensors' own reader, shards against their index, side files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qbench.errors import QbenchError
from qbench.models.huggingface import EMBEDDING, HEAD, INDEX, SINGLE, open_huggingface
from qbench.models.source import open_model
from tests.tiny import make_tiny_llama


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A tiny model that may be written to."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / SINGLE).unlink(missing_ok=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit_index(folder: Path, name: str, shard: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    if shard is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder: Path, name: str) -> str:
    return str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def test_tensors_equal_the_stored_ones(tiny_llama: Path) -> None:
    source, stored = open_model(tiny_llama), load_file(tiny_llama / SINGLE)
    assert set(source.tensors) == set(stored)
    assert all(torch.equal(source.load(name), stored[name]) for name in stored)  # type: ignore[arg-type]
    assert source.config == json.loads((tiny_llama / "config.json").read_text())
    with pytest.raises(KeyError):
        source.load("model.layers.9.mlp.up_proj.weight")


def test_shards_hold_the_same_tensors_as_one_file(tiny_llama: Path, sharded: Path) -> None:
    single, source = open_model(tiny_llama), open_model(sharded)
    assert source.tensors == single.tensors
    assert all(torch.equal(source.load(name), single.load(name)) for name in single.tensors)  # type: ignore[arg-type]


@pytest.mark.trap(31)
def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    shard = shard_of(sharded, "model.norm.weight")
    (sharded / shard).unlink()
    with pytest.raises(QbenchError, match=f"{shard} is missing"):
        open_model(sharded)


@pytest.mark.trap(31)
def test_index_and_shards_have_to_agree(sharded: Path) -> None:
    right = shard_of(sharded, "model.norm.weight")
    other = next(p.name for p in sorted(sharded.glob("*.safetensors")) if p.name != right)
    edit_index(sharded, "model.norm.weight", other)
    with pytest.raises(QbenchError, match=r"'model\.norm\.weight' is (missing|in this shard and, by)"):
        open_model(sharded)
    edit_index(sharded, "model.norm.weight", None)
    with pytest.raises(QbenchError, match=r"'model\.norm\.weight' is in this shard but not in"):
        open_model(sharded)
    edit_index(sharded, "model.norm.weight", right)
    edit_index(sharded, "model.extra.weight", right)
    with pytest.raises(QbenchError, match=r"'model\.extra\.weight' is missing"):
        open_model(sharded)


@pytest.mark.trap(31)
def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    right = shard_of(sharded, "model.norm.weight")
    other = next(p for p in sorted(sharded.glob("*.safetensors")) if p.name != right)
    save_file(load_file(other) | {"model.norm.weight": torch.ones(64)}, other)
    with pytest.raises(QbenchError, match=r"'model\.norm\.weight' is in this shard and, by"):
        open_model(sharded)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "sub/x.safetensors", "x.bin"]
)
def test_an_index_cannot_point_out_of_the_folder(sharded: Path, shard: str) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, sharded.parent / "x.safetensors")
    edit_index(sharded, "model.norm.weight", shard)
    with pytest.raises(QbenchError, match=r"'model\.norm\.weight'.*allowed: a file of this folder"):
        open_model(sharded)


def test_an_index_that_is_not_one_is_refused(sharded: Path) -> None:
    for text in (
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "x", "a": "y"}}',
    ):
        (sharded / INDEX).write_text(text)
        with pytest.raises(QbenchError, match=INDEX):
            open_model(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(QbenchError, match="neither"):
        open_model(sharded)


@pytest.mark.trap(1)
def test_a_tied_head_is_absent_even_when_it_is_stored(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    assert HEAD not in open_model(folder).tensors
    stored = load_file(folder / SINGLE)
    save_file(stored | {HEAD: stored[EMBEDDING].clone()}, folder / SINGLE, metadata={"format": "pt"})
    source = open_model(folder)
    assert HEAD not in source.tensors and source.config["tie_word_embeddings"] is True


@pytest.mark.trap(1)
def test_a_stored_head_that_differs_from_the_tied_embedding_counts(tmp_path: Path) -> None:
    """As in transformers, which then leaves the two apart."""
    folder = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    stored = load_file(folder / SINGLE)
    save_file(stored | {HEAD: stored[EMBEDDING] * 2}, folder / SINGLE, metadata={"format": "pt"})
    source = open_model(folder)
    assert source.config["tie_word_embeddings"] is False
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(source.load(HEAD), theirs.lm_head.weight)  # type: ignore[arg-type]
    assert torch.equal(source.load(EMBEDDING), theirs.model.embed_tokens.weight)  # type: ignore[arg-type]


@pytest.mark.trap(33)
def test_side_files_are_copied_unchanged_and_code_is_not(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_tiny.py").write_text("raise SystemExit('ran')")
    (folder / "tokenizer.py").write_text("raise SystemExit('ran')")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    target = tmp_path / "out"
    target.mkdir()
    names = open_model(folder).write_side_files(target)
    expected = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert set(names) == expected | {"additional_chat_templates/tool.jinja"}
    assert {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()} == set(names)
    assert all((target / name).read_bytes() == (folder / name).read_bytes() for name in names)
    text = "Hello <|im_start|>  wörld\n\t3"
    ours, theirs = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(folder)
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_the_revision_follows_every_byte(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    first = open_model(folder).revision
    assert open_model(folder).revision == first
    shutil.copytree(folder, tmp_path / "copy")
    assert open_model(tmp_path / "copy").revision == first
    seen = {first}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (folder / name).write_text((folder / name).read_text() + "\n")
        seen.add(open_model(folder).revision)
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    seen.add(open_model(folder).revision)
    assert len(seen) == 5


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds ``org/tiny`` as the hub's client stores it (symlinks into blobs), and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "models--org--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    shutil.copytree(tiny_llama, root / "blobs")
    for blob in (root / "blobs").iterdir():
        (root / "snapshots" / COMMIT / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return root


def test_a_cached_hub_model_opens_offline(hub: Path, tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model("org/tiny")
    assert (source.location, source.revision) == ("org/tiny", COMMIT)
    assert source.tensors == open_huggingface(str(tiny_llama)).tensors
    (tmp_path / "out").mkdir()
    for name in source.write_side_files(tmp_path / "out"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_bytes() == (tiny_llama / name).read_bytes()


def test_a_hub_model_that_cannot_be_reached_is_explained(hub: Path) -> None:
    for location in ("org/other", "org/tiny@v2"):
        with pytest.raises(QbenchError, match=f"{location}.*no local folder"):
            open_model(location)


def test_no_code_and_no_pickles_are_asked_for(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tiny_llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_model("org/tiny@main")
    assert (asked["name"], asked["revision"]) == ("org/tiny", "main")
    listing = ["modeling.py", "a.bin", "a.pt", "model.safetensors", "tokenizer.model", "chat_template.jinja"]
    kept = list(huggingface_hub.utils.filter_repo_objects(listing, allow_patterns=asked["allow_patterns"]))  # type: ignore[arg-type]
    assert kept == ["model.safetensors", "tokenizer.model", "chat_template.jinja"]
