from pathlib import Path

import pytest

from qbench.calibration.data import check_data, load_data
from qbench.errors import QbenchError


@pytest.mark.trap(11)
def test_a_blank_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(QbenchError, match="no text"):
        load_data(str(tmp_path / "blank.txt"))


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
