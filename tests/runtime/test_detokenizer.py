from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from qbench.runtime.detokenizer import REPLACEMENT, Detokenizer, StopTexts
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
texts = st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=30)


def pieces(ids: list[int], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.trap(54)
@given(texts)
def test_pieces_join_to_the_text_without_half_characters(text: str) -> None:
    found = pieces(TOKENIZER(text)["input_ids"])
    assert "".join(found) == text
    assert REPLACEMENT not in "".join(found)


@pytest.mark.trap(54)
def test_a_character_comes_with_its_last_byte() -> None:
    ids = TOKENIZER("a😀漢b")["input_ids"]
    assert len(ids) == 9
    assert pieces(ids) == ["a", "", "", "", "😀", "", "", "漢", "b", ""]


@given(st.lists(st.integers(3, 299), max_size=40))
def test_any_tokens_join_to_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    ids = TOKENIZER("é")["input_ids"][:1]
    assert pieces(ids) == ["", REPLACEMENT]


def test_special_tokens_are_left_out() -> None:
    ids = [*TOKENIZER("hi")["input_ids"], 1, 2, *TOKENIZER("you")["input_ids"]]
    assert "".join(pieces(ids)) == "hiyou"


def test_a_decoder_that_drops_the_first_space_keeps_the_others() -> None:
    vocab = {token: index for index, token in enumerate(["<unk>", "▁the", "▁cat", "s", "<0xC3>", "<0xA9>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert pieces([1, 2, 3, 4, 5, 1, 2], tokenizer) == ["the", " cat", "s", "", "é", " the", " cat", ""]


def shown(chunks: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    checker = StopTexts(stops)
    out = []
    for chunk in chunks:
        out.append(checker.push(chunk))
        if checker.found is not None:
            return out, checker.found
    return [*out, checker.flush()], None


@pytest.mark.trap(55)
def test_nothing_of_a_stop_text_is_ever_shown() -> None:
    assert shown(["ABCDE", "FG"], ["DEF"]) == (["ABC", ""], "DEF")
    assert shown(["ABCDE", "XFG"], ["DEF"]) == (["ABC", "DEXFG", ""], None)
    assert shown(["ABCDE"], ["DEF"]) == (["ABC", "DE"], None)


def test_the_stop_text_that_is_complete_first_counts_and_of_those_the_longest() -> None:
    assert shown(["abcdefgh"], ["bcdef", "cd"]) == (["ab"], "cd")
    assert shown(["abcd"], ["d", "cd"]) == (["ab"], "cd")


def test_an_overlapping_beginning_is_held_back() -> None:
    assert shown(["aa", "ab"], ["aab"]) == (["", "a"], "aab")


@pytest.mark.trap(55)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_where_tokens_end_does_not_change_where_the_text_ends(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, stop = shown(chunks, stops)
    by_character, stop_by_character = shown(list(text), stops)
    assert ("".join(found), stop) == ("".join(by_character), stop_by_character)
    assert not any(s in "".join(found) for s in stops)
    assert text.startswith("".join(found))
