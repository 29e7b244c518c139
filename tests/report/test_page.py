"""The page holds every variant, needs nothing else, and is well formed whatever the names are."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.report.page import variant_styles, write_report
from qbench.result import make_results, write_results
from tests.report.made_up import HOSTILE, QUALITY, made_up_run


class Checker(HTMLParser):
    """Collects text and tags, and asserts that every element is closed in order."""

    EMPTY = frozenset(("meta", "input", "br", "link", "img"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_the_page_shows_the_run(tmp_path: Path) -> None:
    path = write_report(made_up_run(tmp_path))
    assert path == tmp_path / "report.html"
    page = path.read_text(encoding="utf-8")
    text = " ".join(read(page).text)
    for expected in (
        "gptq",
        "nf4",
        "reference",
        "33.00",
        "+10.00%",
        "0.0500",
        "< 1e-6",
        "1 min 15 s",
        "name: trial",
        "m.gguf",
        "group size 32",
    ):
        assert expected in text, expected
    for heading in ("Quality against size", "Quality against speed", "Error by layer", "Exports", "Provenance"):
        assert heading in text
    assert "quantized weights exact; others, rounded, differ by up to 0.00031 (layers.1.mlp)" in text
    assert "/somewhere" not in page
    assert "gptq: 2 layers were not solved as asked: no token came by." in text
    assert page.count('data-v="nf4"') >= 8  # table rows, points in two charts, lines


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = write_report(made_up_run(tmp_path)).read_text(encoding="utf-8")
    for tag, attributes in read(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "xlink:href", "srcset"} & attributes.keys()
    assert not re.search(r"https?://|url\(|@import", page)
    assert len(page) < 500_000


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = write_report(made_up_run(tmp_path, second=HOSTILE)).read_text(encoding="utf-8")
    checker = read(page)
    assert [tag for tag, _ in checker.tags].count("script") == 1
    assert HOSTILE in {attributes.get("data-v") for _, attributes in checker.tags}
    assert HOSTILE in "".join(checker.text)


def test_what_differs_is_shown_in_brackets_and_left_out_of_charts_and_cards(tmp_path: Path) -> None:
    run = made_up_run(tmp_path, second_quality=QUALITY | {"window": {"seq_len": 128}})
    page = write_report(run).read_text(encoding="utf-8")
    assert 'title="not ranked: another window"' in page
    assert "nf4: perplexity was measured with another window and is not ranked." in page
    assert 'class="dot"' in page
    assert not re.search(r'<g class="series s\d+" data-v="nf4"><title>[^<]*KL', page)
    assert "Closest to the reference" not in page  # one variant is left: nothing to rank


def test_a_run_without_measurements_still_has_a_page(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    write_results(run / "results.jsonl", make_results("gptq", [("bits_per_weight", 4.5, {})], {}))
    text = " ".join(read(write_report(run).read_text(encoding="utf-8")).text)
    assert "4.50" in text
    assert "Quality against size" not in text


@pytest.mark.parametrize("content", [None, '{"recipe_name": 3}', "{"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(QbenchError, match=r"run\.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_more_variants_than_colours(tmp_path: Path) -> None:
    names = ["a", "reference", *(f"v{i}" for i in range(12))]
    styles = variant_styles(names)
    assert styles["reference"] == 0
    assert len(set(styles.values())) == len(names)
