"""Where a prompt gets checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.saves import CachePolicy, save_points

POLICY = CachePolicy(min_tokens=16, gap=16, interval=1000)


def points(prompt: int, start: int = 0, junction: int = 0, *boundaries: int) -> dict[int, Kind]:
    found = save_points(prompt, start, junction, boundaries, (), POLICY)
    return {p.position: p.kind for p in found}


def test_a_conversation() -> None:
    assert points(2500, 0, 0, 700, 2494) == {
        700: Kind.SYSTEM,
        1000: Kind.INTERVAL,
        2000: Kind.INTERVAL,
        2494: Kind.STABLE,
    }


def test_without_boundaries_one_before_the_end() -> None:
    assert points(300) == {299: Kind.PROMPT}


def test_the_junction_comes_first() -> None:
    assert points(900, 0, 505, 500, 894) == {505: Kind.JUNCTION, 894: Kind.STABLE}
    # Following a known path to the end is no junction inside the prompt.
    assert points(900, 0, 900, 894) == {894: Kind.STABLE}


def test_nothing_near_the_start_or_a_checkpoint() -> None:
    assert points(900, 500, 510, 400, 890) == {890: Kind.STABLE}
    assert save_points(900, 500, 700, (890,), (695, 886), POLICY) == []
    assert points(12) == {}


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.lists(st.integers(0, 5000), max_size=4).map(sorted),
    st.lists(st.integers(0, 5000), max_size=4),
)
def test_points_are_apart_and_inside(
    prompt: int, start: int, junction: int, boundaries: list[int], taken: list[int]
) -> None:
    found = save_points(prompt, start, junction, boundaries, taken, POLICY)
    positions = [p.position for p in found]
    assert positions == sorted(set(positions))
    near = [start, *taken, *positions]
    for position in positions:
        assert max(start, 15) < position < prompt
        assert sum(abs(position - other) < 16 for other in near) == 1
