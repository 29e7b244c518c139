"""Manifests: those that ship, those of the user's own, and the hub."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench.calibration.data import check_data, load_data, manifests
from qbench.calibration.manifest import Manifest, read_manifest
from qbench.errors import QbenchError
from qbench.resources import data_dir

COMMIT = "0" * 40


def write(path: Path, **content: Any) -> str:
    path.write_text(yaml.safe_dump({"description": "d", "licence": "MIT", **content}))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as a folder of files, which `datasets` reads like one of the hub."""
    made = tmp_path / "set"
    made.mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"text": f"{split} {i}", "id": i}) for i in range(5)]
        (made / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return made


@pytest.mark.parametrize("name", manifests())
def test_a_set_that_ships_says_where_it_is_from_and_its_splits_share_nothing(name: str) -> None:
    manifest = read_manifest(manifests()[name])
    assert isinstance(manifest, Manifest) and manifest.licence and manifest.description
    calibration, held_out = (load_data(name, split).documents for split in ("calibration", "held-out"))
    assert not {json.dumps(document) for document in calibration} & {json.dumps(document) for document in held_out}
    assert abs(len(calibration) - len(held_out)) <= 1
    assert f"| `{name}` |" in (data_dir("calib_data") / "README.md").read_text()


def test_question_and_answer_become_a_conversation() -> None:
    first = load_data("grade-school-math", "calibration").documents[0]
    assert isinstance(first, list)
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert first[0]["content"].startswith("Janet’s ducks lay 16 eggs per day.")
    assert first[1]["content"].endswith("#### 18")
    assert check_data("grade-school-math", "calibration")


def test_a_mix_takes_turns_by_length() -> None:
    documents = load_data("mixed", "calibration").documents
    parts = [load_data(name, "calibration").documents for name in ("wiki-paragraphs", "grade-school-math")]
    assert documents[0] == parts[0][0] and documents[1] == parts[1][0]
    begin = documents[:200]
    prose = sum(len(document) for document in begin if isinstance(document, str))
    chat = sum(len(m["content"]) for document in begin if isinstance(document, list) for m in document)
    assert 0.3 < prose / (prose + chat) < 0.7
    assert check_data("mixed", "calibration")


def test_a_folder_through_datasets(tmp_path: Path, folder: Path) -> None:
    source = {"dataset": str(folder), "documents": 3}
    name = write(tmp_path / "own.yaml", source=source, splits={"calibration": "train", "held-out": "validation"})
    assert load_data(name, "calibration").documents == ["train 0", "train 1", "train 2"]
    assert load_data(name, "held-out").documents == ["validation 0", "validation 1", "validation 2"]
    with pytest.raises(QbenchError, match=r"no split 'test'\. Allowed: calibration, held-out"):
        check_data(name, "test")
    with pytest.raises(QbenchError, match="which column to read"):
        check_data(name, "calibration", "text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": "body"}, "row 0 of train: no column 'body'; found 'text', 'id'"),
        ({"column": "id"}, "row 0 of train, 'id': found 0; expected a text"),
        ({"config": "no-such"}, "could not be read"),
    ],
)
def test_a_set_that_is_not_as_its_manifest_says(
    tmp_path: Path, folder: Path, change: dict[str, str], message: str
) -> None:
    source = {"dataset": str(folder), **change}
    name = write(tmp_path / "own.yaml", source=source, splits={"calibration": "train"})
    with pytest.raises(QbenchError, match=message):
        load_data(name, "calibration")


def test_a_folder_that_is_not_there_and_a_split_it_does_not_have(tmp_path: Path, folder: Path) -> None:
    name = write(tmp_path / "a.yaml", source={"dataset": str(tmp_path / "none")}, splits={"calibration": "train"})
    with pytest.raises(QbenchError, match="there is no folder"):
        check_data(name, "calibration")
    name = write(tmp_path / "b.yaml", source={"dataset": str(folder)}, splits={"calibration": "test"})
    with pytest.raises(QbenchError, match="could not be read: "):
        load_data(name, "calibration")


def test_a_file_of_ones_own_with_splits(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"body": str(i)}) + "\n" for i in range(5)))
    source = {"path": "all.jsonl", "column": "body"}
    name = write(tmp_path / "own.yaml", source=source, splits={"calibration": "even", "held-out": "odd"})
    assert not check_data(name, "calibration")
    assert load_data(name, "calibration").documents == ["0", "2", "4"]
    assert load_data(name, "held-out").documents == ["1", "3"]
    name = write(tmp_path / "own.yaml", source={"path": "none.jsonl"}, splits={"calibration": "even"})
    with pytest.raises(QbenchError, match=r"none\.jsonl does not exist"):
        check_data(name, "calibration")


def test_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    source = {"dataset": "some/set", "revision": COMMIT}
    name = write(tmp_path / "own.yaml", source=source, splits={"calibration": "train"})
    import datasets

    class Rows:
        def take(self, count: int) -> list[dict[str, str]]:
            return [{"text": "one"}, {"text": "two"}][:count]

    asked = []

    def load(*args: Any, **options: Any) -> Rows:
        asked.append((args, options))
        return Rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_data(name, "calibration").documents == ["one", "two"]
    assert load_data(name, "calibration").documents == ["one", "two"]
    assert asked == [(("some/set", None), {"split": "train", "revision": COMMIT, "streaming": True})]


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    name = write(
        tmp_path / "own.yaml", source={"dataset": "some/set", "revision": COMMIT}, splits={"calibration": "train"}
    )
    import datasets

    def load(*args: Any, **options: Any) -> None:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(QbenchError, match=r"some/set \(train\) is not in the cache .* the hub cannot be reached"):
        load_data(name, "calibration")


def test_without_datasets_the_message_says_what_to_install(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find_spec(name))
    name = write(tmp_path / "own.yaml", source={"dataset": str(folder)}, splits={"calibration": "train"})
    with pytest.raises(QbenchError, match=r"needs `datasets`: pip install 'qbench-workbench\[data\]'"):
        check_data(name, "calibration")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "give source, or mix"),
        ({"source": {"dataset": "some/set"}, "splits": {"calibration": "train"}}, "give the commit"),
        ({"source": {"dataset": "some/set", "revision": "main"}, "splits": {"a": "train"}}, "source|revision"),
        ({"source": {"dataset": "/x", "colum": "a"}, "splits": {"a": "train"}}, "colum: Extra inputs"),
        ({"mix": ["wiki-paragraphs"]}, "mix: "),
        ({"source": {"dataset": "/x"}}, "splits: a source has some"),
        ({"source": {"path": "a.txt"}, "splits": {"calibration": "train"}}, "split into even and odd"),
    ],
)
def test_manifests_that_are_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    name = write(tmp_path / "own.yaml", **content)
    with pytest.raises(QbenchError, match=rf"own\.yaml: .*({message})"):
        check_data(name, "calibration")


@pytest.mark.parametrize("part", ["own.yaml", "mixed", "self-generated", "a.txt"])
def test_a_mix_is_made_of_sets(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.yaml", mix=["wiki-paragraphs", part])
    with pytest.raises(QbenchError, match=rf"a mix is made of sets with splits; found '{part}'"):
        check_data("own.yaml", "calibration")


def test_a_manifest_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: [")
    with pytest.raises(QbenchError, match=r"own\.yaml: cannot be read"):
        check_data(str(tmp_path / "own.yaml"), "calibration")
    with pytest.raises(QbenchError, match="does not exist"):
        check_data(str(tmp_path / "other.yaml"), "calibration")
