"""The suffix index against a search through the whole history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.spec.index import LONG, LOOK_BACK, SHORT, SuffixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def index_of(tokens: list[int], fed: int = 0) -> SuffixIndex:
    """fed: how many of them come one by one."""
    at = len(tokens) - fed
    index = SuffixIndex(np.array(tokens[:at], np.int32))
    for token in tokens[at:]:
        index.extend([token])
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


@given(TOKENS, st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9))
def test_tokens_that_come_at_once(start: list[int], more: list[list[int]]) -> None:
    """As many of them as the match had predicted are hits."""
    index, text = index_of(start), list(start)
    for tokens in more:
        predicted = index.draft(len(tokens))
        hits = index.extend(tokens)
        assert predicted[:hits] == tokens[:hits]
        assert hits == len(tokens) or predicted[hits : hits + 1] != tokens[hits : hits + 1]
        text += tokens
        check(index, text)


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
        assert index.extend([token]) == 1
    assert index.length == length + 30
    assert index.extend([999]) == 0
    assert index.at == index.length == 0


def test_a_long_history() -> None:
    """More than the tables hold: most of the newest places are known, lengths are bounded."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 250_000, 100_000, dtype=np.int32)
    found = 0
    for start in range(36_000, 99_000, 1000):
        index = SuffixIndex(np.concatenate([ids, ids[start : start + 20]]))
        if index.at == start + 20:
            assert index.draft(5) == ids[start + 20 : start + 25].tolist()
            assert index.length == 20
            found += 1
    assert found > 40
    same = SuffixIndex(np.zeros(1000, np.int32))
    assert same.length == LOOK_BACK
    assert same.draft(3) == [0, 0, 0]


def test_a_history_that_grows_out_of_what_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was near is found when it is far, and tables are made anew."""
    monkeypatch.setattr("kslserve.sched.spec.index.NEAR", 50)
    ids = np.random.default_rng(2).integers(0, 5000, 1000, dtype=np.int32).tolist()
    index = index_of(ids[:30])
    for start in range(30, 1000, 7):
        index.extend(ids[start : start + 7])
    found = 0
    for start in range(0, 960, 20):
        again = ids[start : start + 12]
        assert index.extend([6000 + start]) == 0
        index.extend(again)
        if index.at:
            assert index.draft(1) == [ids[start + 12]]
            assert index.length == 12
            found += 1
    assert found > 40
    assert len(index) == 30 + 7 * 139 + 48 * 13 - 3


def test_a_place_between_two_tokens_is_none() -> None:
    """As bytes, 256 is there where 1 follows on 0."""
    index = index_of([7, 0, 1, 0, 0, 9, 256, 256, 256])
    assert not index.at
    text = [0, 0, 1 << 24, 0, 0, 5, 0, 0, 1, 0]
    for n in range(len(text)):
        check(index_of(text[: n + 1]), text[: n + 1])
