"""Batching policy as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.plan import ALONE_START, CHUNK_MIN, CHUNK_START, Budget, WaveCost, share

LEFT = st.lists(st.one_of(st.just(0), st.integers(1, 300)), min_size=1, max_size=12)


@given(left=LEFT, served=st.data(), columns=st.integers(1, 200), prompt=st.integers(1, 200))
def test_share_keeps_its_bounds(
    left: list[int], served: st.DataObject, columns: int, prompt: int
) -> None:
    last = served.draw(st.lists(st.integers(0, 9), min_size=len(left), max_size=len(left)))
    grants = share(left, last, Budget(columns, prompt))
    assert len(grants) == len(left)
    assert all(0 <= g <= max(1, n) for g, n in zip(grants, left, strict=True))
    assert 1 <= sum(grants) <= columns
    prompt_columns = sum(g for g, n in zip(grants, left, strict=True) if n)
    assert prompt_columns <= prompt
    decoding = [g for g, n in zip(grants, left, strict=True) if not n]
    if len(decoding) <= columns:
        assert all(decoding)
    # Nothing that could be computed is left out while there is room.
    room = min(prompt, columns - sum(decoding))
    assert prompt_columns == min(room, sum(left))
    # The oldest prompt always advances by at least half.
    oldest = next((i for i, n in enumerate(left) if n), None)
    if oldest is not None and room > 0:
        assert grants[oldest] >= min(left[oldest], -(-room // 2))


def test_a_short_prompt_passes_a_long_one() -> None:
    assert share([900, 300, 20], [0, 0, 0], Budget(100, 100)) == [50, 30, 20]


def test_prompts_that_are_about_as_long_are_computed_one_after_the_other() -> None:
    budget = Budget(64, 64)
    assert share([100, 100, 60], [0, 0, 0], budget) == [64, 0, 0]
    assert share([30, 100, 60, 60], [0] * 4, budget) == [30, 0, 34, 0]
    assert share([100, 0, 49, 20], [0] * 4, budget) == [31 + 1, 1, 11, 20]


def test_decoding_rows_take_turns_where_not_all_fit() -> None:
    assert share([0, 0, 0], [5, 3, 4], Budget(2, 2)) == [0, 1, 1]


@pytest.mark.parametrize(
    ("base", "slope"), [(1.0, 0.05), (20.0, 0.5), (5.0, 2.0), (0.0, 0.01), (100.0, 1.0)]
)
def test_chunk_settles_where_a_wave_takes_its_target(base: float, slope: float) -> None:
    cost = WaveCost(50.0, 250.0, 512)
    for i in range(60):
        prompt = cost.chunk
        cost.observe(prompt + 2, prompt, base + slope * (prompt + 2))
        if i % 3 == 0:
            cost.observe(2, 0, base + slope * 2)
    allowed = max(50.0, 2 * base)
    took = base + slope * (cost.chunk + 2)
    assert took <= allowed + slope * CHUNK_MIN
    assert cost.chunk == 512 or took >= 0.6 * allowed


@pytest.mark.parametrize(("base", "slope"), [(1.0, 0.05), (5.0, 2.0), (20.0, 1.0)])
def test_waves_without_decode_rows_may_take_the_whole_gap(base: float, slope: float) -> None:
    """And the chunk beside decode rows stays where it was."""
    cost = WaveCost(50.0, 250.0, 512)
    for i in range(60):
        cost.observe(cost.alone, cost.alone, base + slope * cost.alone)
        if i % 3 == 0:
            cost.observe(2, 0, base + slope * 2)
    took = base + slope * cost.alone
    assert took <= 250.0
    assert cost.alone == 512 or took >= 0.6 * 250.0
    beside = base + slope * (cost.chunk + 2)
    assert beside <= 50.0 + slope * CHUNK_MIN
    assert cost.chunk == 512 or beside >= 0.6 * 50.0


def test_chunk_halves_when_a_wave_is_too_long() -> None:
    cost = WaveCost(50.0, 250.0, 512)
    assert (cost.chunk, cost.alone) == (CHUNK_START, ALONE_START)
    cost.observe(64, 64, 500.0)
    assert cost.chunk == 32
    for _ in range(5):
        cost.observe(cost.chunk, cost.chunk, 500.0)
    assert cost.chunk == CHUNK_MIN


def test_gap_bounds_the_chunk_of_a_slow_machine() -> None:
    """Decoding alone takes 200 ms: twice that would exceed the gap."""
    cost = WaveCost(50.0, 250.0, 512)
    for _ in range(40):
        cost.observe(1, 0, 201.0)
        cost.observe(1 + cost.chunk, cost.chunk, 200.0 + 1 + cost.chunk)
    assert cost.chunk <= 50
    patient = WaveCost(50.0, 1000.0, 512)
    for _ in range(40):
        patient.observe(1, 0, 201.0)
        patient.observe(1 + patient.chunk, patient.chunk, 200.0 + 1 + patient.chunk)
    assert patient.chunk > 80


def test_chunk_never_exceeds_the_wave() -> None:
    cost = WaveCost(50.0, 250.0, 8)
    assert cost.chunk == 8
    cost.observe(8, 8, 900.0)
    assert cost.chunk == 8
    cost.observe(8, 8, 0.0)
    assert cost.chunk == 8


@given(
    waves=st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(0, 1e6)), max_size=40
    )
)
def test_chunk_stays_in_range_whatever_is_measured(waves: list[tuple[int, int, float]]) -> None:
    cost = WaveCost(50.0, 250.0, 512)
    for decode, prompt, ms in waves:
        if decode + prompt:
            cost.observe(decode + prompt, prompt, ms)
            base, slope = cost.line()
            assert base >= 0.0
            assert slope >= 0.0
        assert CHUNK_MIN <= cost.chunk <= 512
