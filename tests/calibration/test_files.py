"""Files of the user's own: what is read, and what is refused before a run begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qbench.calibration.data import check_data, load_data
from qbench.errors import QbenchError

CHAT = [[{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]]


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "set.jsonl", {"text": "one", "id": 1}, {"text": "two"})
    assert load_data(path).documents == ["one", "two"]
    assert not check_data(path, None)


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "set.parquet", text=["one", "two", " "], id=[1, 2, 3])
    assert load_data(path).documents == ["one", "two"]
    assert load_data(parquet(tmp_path / "b.parquet", story=["once"]), None, "story").documents == ["once"]


def test_conversations_are_told_from_texts_by_their_column(tmp_path: Path) -> None:
    in_lines = lines(tmp_path / "chat.jsonl", {"messages": CHAT[0], "text": "not this"})
    in_parquet = parquet(tmp_path / "chat.parquet", messages=CHAT, text=["not this"])
    for path in (in_lines, in_parquet):
        assert load_data(path).documents == CHAT
        assert check_data(path, None)
        assert load_data(path, None, "text").documents == ["not this"]


def test_equal_content_has_one_hash_whatever_the_file(tmp_path: Path) -> None:
    in_lines = load_data(lines(tmp_path / "chat.jsonl", {"messages": CHAT[0]}))
    in_parquet = load_data(parquet(tmp_path / "chat.parquet", messages=CHAT))
    assert in_lines.sha256 == in_parquet.sha256 != load_data(lines(tmp_path / "t.jsonl", {"text": "Four."})).sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.parquet", b"", "is empty"),
        ("a.txt", b"caf\xe9 au lait", r"not UTF-8 text \(byte 3\)"),
        ("a.txt", b"abc" + bytes(5000), r"not text \(byte 3 is NUL\)"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', r"not UTF-8 text \(byte 13\)"),
        ("a.jsonl", b"text\n", "line 1: expected a JSON object"),
        ("a.jsonl", b'["text"]\n', "line 1: expected a JSON object"),
        ("a.jsonl", b'{"txt": "one", "id": 3}\n', "line 1: no column 'text' or 'messages'; found 'txt', 'id'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1, 'text': found 3; expected a text, or messages"),
        ("a.jsonl", b'{"messages": []}\n', r"'messages': found \[\]"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "'messages': found .*expected a text, or messages"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"'text': no Unicode text: surrogates not allowed \(character 1\)"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "\\udfff"}]}\n', "'messages': no Unicode text"),
        ("a.parquet", b"PAR1 and then nothing", "no readable parquet file"),
    ],
)
def test_what_is_refused_before_the_run(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QbenchError, match=message):
        check_data(str(tmp_path / name), None)


def test_a_later_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "set.jsonl", {"text": "one"}, {"txt": "two"})
    check_data(path, None)
    with pytest.raises(QbenchError, match="line 2: no column"):
        load_data(path)


def test_a_character_cut_by_the_end_of_what_is_looked_at_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * (2**20 - 1) + "é")
    assert not check_data(str(path), None)


def test_columns_of_parquet_are_checked_from_its_footer(tmp_path: Path) -> None:
    path = parquet(tmp_path / "set.parquet", content=["one"], id=[1])
    with pytest.raises(QbenchError, match="no column 'text' or 'messages'; found 'content', 'id'"):
        check_data(path, None)
    with pytest.raises(QbenchError, match="no column 'body'"):
        check_data(path, None, "body")
    with pytest.raises(QbenchError, match="row 0, 'id': found 1; expected a text"):
        load_data(path, None, "id")


def test_a_parquet_file_whose_data_is_damaged(tmp_path: Path) -> None:
    path = Path(parquet(tmp_path / "set.parquet", text=[str(i) * 50 for i in range(1000)]))
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    check_data(str(path), None)
    with pytest.raises(QbenchError, match=r"damaged \("):
        load_data(str(path))


def test_a_parquet_file_whose_text_is_not_utf8(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    with pytest.raises(QbenchError, match=r"set\.parquet: damaged \("):
        load_data(parquet(tmp_path / "set.parquet", text=text))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "set.parquet", text=["one"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(QbenchError, match=r"pip install 'qbench-workbench\[data\]'"):
        check_data(path, None)


def test_a_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(QbenchError, match="a text has no columns; found column 'body'"):
        check_data(str(tmp_path / "a.txt"), None, "body")
