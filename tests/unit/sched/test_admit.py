"""Admission policy as pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.admit import OVERTAKES_MAX, Waiting, admit, order


def waiting(number: int, **changes: int) -> Waiting:
    fields = {"priority": 0, "side": 0, "blocks": 2, "overtaken": 0, **changes}
    return Waiting(
        number, fields["priority"], bool(fields["side"]), fields["blocks"], fields["overtaken"]
    )


def test_order() -> None:
    queue = [
        waiting(1, priority=1),
        waiting(2),
        waiting(3, side=1),
        waiting(4, priority=-1),
        waiting(5, priority=5, overtaken=OVERTAKES_MAX),
        waiting(6),
    ]
    assert [w.number for w in order(queue)] == [5, 4, 3, 2, 6, 1]


def test_places_and_blocks_bound_admission() -> None:
    queue = [waiting(n) for n in range(1, 6)]
    assert admit(queue, places=2, blocks=100) == [1, 2]
    assert admit(queue, places=9, blocks=7) == [1, 2, 3]
    assert admit(queue, places=0, blocks=7) == []
    assert admit([], places=3, blocks=7) == []


def test_only_side_requests_pass_one_that_does_not_fit() -> None:
    queue = [waiting(1, blocks=9), waiting(2), waiting(3, side=1, priority=1)]
    assert admit(queue, places=4, blocks=5) == [3]
    assert admit(queue, places=4, blocks=9) == [1]


def test_nobody_passes_one_that_was_overtaken_often() -> None:
    old = waiting(1, blocks=9, overtaken=OVERTAKES_MAX)
    assert admit([old, waiting(2, side=1)], places=4, blocks=5) == []
    tired = waiting(1, priority=3, overtaken=OVERTAKES_MAX - 1)
    assert admit([tired, waiting(2), waiting(3), waiting(4)], places=2, blocks=100) == [2, 1]
    assert admit([tired, waiting(2), waiting(3)], places=9, blocks=100) == [2, 1, 3]


QUEUE = st.lists(
    st.tuples(st.integers(-2, 2), st.booleans(), st.integers(1, 8), st.integers(0, OVERTAKES_MAX)),
    max_size=12,
)


@given(queue=QUEUE, places=st.integers(0, 8), blocks=st.integers(0, 30))
def test_admission_keeps_its_bounds(
    queue: list[tuple[int, bool, int, int]], places: int, blocks: int
) -> None:
    entries = [Waiting(i, *fields) for i, fields in enumerate(queue, 1)]
    entered = admit(entries, places, blocks)
    by_number = {w.number: w for w in entries}
    assert len(set(entered)) == len(entered) <= places
    assert sum(by_number[n].blocks for n in entered) <= blocks
    # Nobody is overtaken more often than allowed, counting those who entered before it.
    for w in entries:
        ahead = entered[: entered.index(w.number)] if w.number in entered else entered
        later = sum(1 for n in ahead if n > w.number)
        assert w.overtaken + later <= max(OVERTAKES_MAX, w.overtaken)
    # With something free and something that fits first in order, somebody enters.
    first = order(entries)[0] if entries else None
    if first is not None and places and first.blocks <= blocks:
        assert entered
