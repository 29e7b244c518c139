"""Every token of the text but the first is scored exactly once, in its own context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbench.errors import QbenchError
from qbench.evaluate.windows import windows

BOS = -1


@pytest.mark.trap(59)
@given(count=st.integers(2, 200), seq_len=st.integers(3, 60), has_bos=st.booleans(), data=st.data())
def test_each_token_but_the_first_is_scored_once(count: int, seq_len: int, has_bos: bool, data: st.DataObject) -> None:
    text = list(range(count))  # each token is its own position
    stride = data.draw(st.none() | st.integers(1, seq_len - 1 - has_bos))
    cut = windows(text, seq_len, stride, BOS if has_bos else None)
    scored = [token for window in cut for token in window.token_ids[window.num_context :]]
    assert scored == text[1:]
    for window in cut:
        assert len(window.token_ids) <= seq_len
        assert (window.token_ids[0] == BOS) == has_bos
        body = window.token_ids[has_bos:]
        assert body == list(range(body[0], body[0] + len(body)))
        assert window.num_context >= 1 + has_bos  # at least one token of the text is context
        assert window.num_scored >= 1


def test_the_default_stride_repeats_one_token() -> None:
    assert [w.token_ids for w in windows(list(range(7)), 3)] == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    assert [w.token_ids for w in windows(list(range(4)), 3, bos=9)] == [[9, 0, 1], [9, 1, 2], [9, 2, 3]]


@pytest.mark.parametrize(
    ("count", "seq_len", "stride", "bos", "said"),
    [
        (1, 8, None, None, "1 tokens"),
        (0, 8, None, None, "0 tokens"),
        (9, 1, None, None, "at least 2"),
        (9, 2, None, 0, "at least 3"),
        (9, 8, 8, None, "1 to 7"),
        (9, 8, 0, None, "1 to 7"),
        (9, 8, 7, 0, "1 to 6"),
    ],
)
def test_what_leaves_nothing_to_score_is_refused(
    count: int, seq_len: int, stride: int | None, bos: int | None, said: str
) -> None:
    with pytest.raises(QbenchError, match=said):
        windows(list(range(count)), seq_len, stride, bos)
