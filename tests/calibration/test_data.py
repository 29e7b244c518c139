import json
from pathlib import Path

import pytest

from qbench.calibration.data import TextData, check_data, load_data
from qbench.calibration.rows import Packing, token_rows
from qbench.errors import QbenchError
from tests.tiny import byte_tokenizer


@pytest.mark.trap(11)
@pytest.mark.parametrize(("packing", "lengths"), [("packed", [500]), ("documents", [50] * 10)])
def test_none_of_the_tokens_of_short_documents_is_dropped(packing: Packing, lengths: list[int]) -> None:
    tokenizer = byte_tokenizer(259)  # a token a byte
    data = TextData(
        "ten", None, ["x" * (48 if packing == "packed" else 50)] * 9 + ["x" * 50]
    )  # packed: a blank line between
    rows = token_rows(data, tokenizer, 32, 512, packing)
    assert [len(row) for row in rows] == lengths


def test_rows_follow_each_other() -> None:
    tokenizer = byte_tokenizer(259)
    data = TextData("abc", None, ["abcdefghij" * 10])
    rows = token_rows(data, tokenizer, 3, 16, "packed")
    assert tokenizer.decode([id for row in rows for id in row]) == ("abcdefghij" * 10)[:48]


@pytest.mark.trap(11)
def test_no_usable_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(QbenchError, match="no text"):
        load_data(str(tmp_path / "blank.txt"))
    with pytest.raises(QbenchError, match="at least 2"):
        token_rows(TextData("one", None, ["x"]), byte_tokenizer(259), 1, 8, "packed")


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "two")) + "\n")
    assert load_data(str(path)).documents == ["one", "two"]
    path.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(QbenchError, match="line 2"):
        load_data(str(path))


def test_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(QbenchError, match="not UTF-8"):
        load_data(str(path))


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("wiki-paragrafs", "calibration", "Did you mean 'wiki-paragraphs'"),
        ("wiki-paragraphs", "train", "Allowed: calibration, held-out"),
        ("wiki-paragraphs", None, "needs a split"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_it_is_fetched(name: str, split: str | None, message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        check_data(name, split)


def test_calibration_and_held_out_text_share_nothing() -> None:
    calibration, held_out = (load_data("wiki-paragraphs", split) for split in ("calibration", "held-out"))
    assert len(calibration.documents) == len(held_out.documents) == 24
    paragraphs = [set("\n\n".join(data.documents).split("\n\n")) for data in (calibration, held_out)]
    assert not paragraphs[0] & paragraphs[1]
    assert min(map(len, paragraphs)) > 300
