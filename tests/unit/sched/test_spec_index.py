"""The suffix index against a search through the whole history."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.spec.index import LONG, LOOK_BACK, SHORT, SPARSE, SuffixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def index_of(tokens: list[int], fed: int = 0) -> SuffixIndex:
    """fed: how many of them come one by one."""
    at = len(tokens) - fed
    index = SuffixIndex(np.array(tokens[:at], np.int32), 1 << 16)
    for token in tokens[at:]:
        index.append(token)
    return index


def check(index: SuffixIndex, tokens: list[int]) -> None:
    """There is a match if the end occurred before, and it is one."""
    n = len(tokens)
    end = tokens[n - SHORT :]
    before = [p for p in range(SHORT, n) if tokens[p - SHORT : p] == end]
    assert len(index) == n
    assert bool(index.at) == (n > SHORT and bool(before))
    if index.at:
        assert SHORT <= index.length <= index.at < n
        assert tokens[index.at - index.length : index.at] == tokens[n - index.length :]
        assert index.predicted == tokens[index.at]
        long_end = tokens[n - LONG :]
        if n > LONG and any(tokens[p - LONG : p] == long_end for p in range(LONG, n)):
            assert index.length >= LONG
        copied = list(tokens)
        for i in range(20):
            copied.append(copied[index.at + i])
        assert index.draft(20) == copied[n:]
    else:
        assert index.draft(20) == []


@given(TOKENS, st.integers(0, 60))
def test_matches_are_those_of_a_search(tokens: list[int], fed: int) -> None:
    check(index_of(tokens, min(fed, len(tokens))), tokens)


@given(TOKENS.filter(bool), st.integers(1, 12), st.integers(0, 60))
def test_matches_are_the_same_where_predictions_are_followed(
    tokens: list[int], period: int, repeated: int
) -> None:
    """Though hardly any place is added while they come true."""
    text = list(tokens)
    for _ in range(repeated):
        text.append(text[-min(period, len(text))])
    index = index_of(text[:5])
    at = followed = 0
    rest = text[5:]
    while at < len(rest):
        hits = index.follow(rest[at : at + 7])
        followed += hits
        at += hits
        if at < len(rest):
            index.append(rest[at])
            at += 1
        check(index, text[: 5 + at])
    if period <= 3 and repeated > 40:
        assert followed > 20


@given(TOKENS, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 9))
def test_what_follows_drafts(tokens: list[int], drafts: list[int], n: int) -> None:
    """As if the drafts were history, but for places among them."""
    index = index_of(tokens)
    before = (index.at, index.length)
    found, length = index.draft_after(drafts, n)
    assert (index.at, index.length) == before
    text = tokens + drafts
    if found:
        assert len(found) == n
        assert length >= SHORT
        ends = [
            p
            for p in range(SHORT, len(text))
            if text[max(0, p - length) : p] == text[max(0, len(text) - length) :]
        ]

        def goes_on(at: int) -> list[int]:
            copied = list(text)
            for i in range(n):
                copied.append(copied[at + i])
            return copied[len(text) :]

        assert found in [goes_on(p) for p in ends]
    elif len(text) > SHORT:
        end = text[len(text) - SHORT :]
        assert all(tokens[p - SHORT : p] != end for p in range(SHORT, len(tokens)))


@given(TOKENS, TOKENS, st.lists(st.integers(0, 2), max_size=30))
def test_tokens_that_come_at_once(start: list[int], more: list[int], then: list[int]) -> None:
    """Matches are true ones, and what comes later is found as ever."""
    index = index_of(start)
    index.extend(more)
    text = start + more
    for token in then:
        index.append(token)
        text.append(token)
    assert len(index) == len(text)
    if index.at:
        assert index.length >= SHORT
        assert text[index.at - index.length : index.at] == text[len(text) - index.length :]
    new = len(start) + len(more)
    end = text[len(text) - SHORT :]
    if any(text[p - SHORT : p] == end for p in range(max(new, SHORT) + 1, len(text))):
        assert index.at


def test_a_repetition_of_tokens_that_came_at_once_is_found_soon() -> None:
    index = index_of(list(range(20)))
    text = list(range(100, 180))
    index.extend(text)
    seen = 0
    while not index.at:
        index.append(text[seen])
        seen += 1
    assert seen <= LONG + SPARSE
    assert index.draft(10) == text[seen : seen + 10]


def test_a_period_is_drafted_on() -> None:
    index = index_of([1, 2, 3, 4, 5] * 3)
    assert index.draft(12) == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert index.length >= LONG


def test_a_match_grows_with_every_token_that_came_true() -> None:
    text = list(range(40))
    index = index_of(text * 2)
    length = index.length
    assert length == 40
    for token in range(30):
        index.append(token)
    assert index.length == length + 30
    index.append(999)
    assert index.at == index.length == 0


def test_a_long_history() -> None:
    """More than the tables hold: most of the newest places are known, lengths are bounded."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 250_000, 100_000, dtype=np.int32)
    found = 0
    for start in range(36_000, 99_000, 1000):
        index = SuffixIndex(np.concatenate([ids, ids[start : start + 20]]), 300_000)
        if index.at == start + 20:
            assert index.draft(5) == ids[start + 20 : start + 25].tolist()
            assert index.length == 20
            found += 1
    assert found > 40
    same = SuffixIndex(np.zeros(1000, np.int32), 2000)
    assert same.length == LOOK_BACK
    assert same.draft(3) == [0, 0, 0]
