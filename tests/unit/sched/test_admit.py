"""Admission policy as pure functions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.admit import OVERTAKES_MAX, Verdict, Waiting, choose, order


def waiting(number: int, **changes: int) -> Waiting:
    fields = {"priority": 0, "side": 0, "overtaken": 0, **changes}
    return Waiting(number, fields["priority"], bool(fields["side"]), fields["overtaken"])


def enter(
    queue: list[Waiting],
    places: int,
    blocks: int,
    needs: dict[int, int],
    waits: frozenset[int] = frozenset(),
    short: frozenset[int] = frozenset(),
) -> list[int]:
    """Numbers of those that enter, one after the other, as long as places and blocks last."""
    entered: list[int] = []

    def judge(entry: Waiting) -> Verdict:
        if entry.number in waits:
            return Verdict.WAITS
        return Verdict.FITS if needs.get(entry.number, 2) <= blocks else Verdict.FULL

    while len(entered) < places:
        chosen = choose(queue, judge, lambda w: w.number in short)
        if chosen is None:
            break
        entered.append(chosen.number)
        blocks -= needs.get(chosen.number, 2)
        queue = [
            replace(w, overtaken=w.overtaken + 1)
            if w.number < chosen.number and w.number not in waits
            else w
            for w in queue
            if w is not chosen
        ]
    return entered


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
    assert enter(queue, 2, 100, {}) == [1, 2]
    assert enter(queue, 9, 7, {}) == [1, 2, 3]
    assert enter(queue, 0, 7, {}) == []
    assert enter([], 3, 7, {}) == []


def test_only_side_requests_pass_one_that_does_not_fit() -> None:
    queue = [waiting(1), waiting(2), waiting(3, side=1, priority=1)]
    assert enter(queue, 4, 5, {1: 9}) == [3]
    assert enter(queue, 4, 9, {1: 9}) == [1]


def test_one_of_which_little_is_left_passes_one_that_does_not_fit() -> None:
    queue = [waiting(1), waiting(2), waiting(3)]
    assert enter(queue, 4, 5, {1: 9}, short=frozenset({3})) == [3]
    assert enter(queue, 4, 9, {1: 9}, short=frozenset({3})) == [1]
    old = [waiting(1, overtaken=OVERTAKES_MAX), *queue[1:]]
    assert enter(old, 4, 5, {1: 9}, short=frozenset({3})) == []


def test_anybody_passes_one_that_waits_for_a_checkpoint() -> None:
    queue = [waiting(1), waiting(2), waiting(3)]
    assert enter(queue, 4, 100, {}, frozenset({1})) == [2, 3]
    assert enter(queue, 4, 100, {2: 101}, frozenset({1})) == []


def test_nobody_passes_one_that_was_overtaken_often() -> None:
    old = waiting(1, overtaken=OVERTAKES_MAX)
    assert enter([old, waiting(2, side=1)], 4, 5, {1: 9}) == []
    tired = waiting(1, priority=3, overtaken=OVERTAKES_MAX - 1)
    assert enter([tired, waiting(2), waiting(3), waiting(4)], 2, 100, {}) == [2, 1]
    assert enter([tired, waiting(2), waiting(3)], 9, 100, {}) == [2, 1, 3]


def test_verdicts_are_asked_for_only_as_far_as_needed() -> None:
    """A verdict costs a look-up of the prompt, and FITS gives memory."""
    asked: list[int] = []

    def judge(entry: Waiting) -> Verdict:
        asked.append(entry.number)
        return Verdict.FULL if entry.number == 1 else Verdict.FITS

    queue = [waiting(1), waiting(2), waiting(3, side=1, priority=1), waiting(4, priority=2)]
    assert choose(queue, judge, lambda w: False) == queue[2]
    assert asked == [1, 3]


QUEUE = st.lists(
    st.tuples(st.integers(-2, 2), st.booleans(), st.integers(1, 8), st.integers(0, OVERTAKES_MAX)),
    max_size=12,
)


@given(queue=QUEUE, places=st.integers(0, 8), blocks=st.integers(0, 30))
def test_admission_keeps_its_bounds(
    queue: list[tuple[int, bool, int, int]], places: int, blocks: int
) -> None:
    entries = [Waiting(i, p, side, old) for i, (p, side, _, old) in enumerate(queue, 1)]
    needs = {i: need for i, (_, _, need, _) in enumerate(queue, 1)}
    entered = enter(entries, places, blocks, needs)
    assert len(set(entered)) == len(entered) <= places
    assert sum(needs[n] for n in entered) <= blocks
    # Nobody is overtaken more often than allowed, counting those who entered before it.
    for w in entries:
        ahead = entered[: entered.index(w.number)] if w.number in entered else entered
        later = sum(1 for n in ahead if n > w.number)
        assert w.overtaken + later <= max(OVERTAKES_MAX, w.overtaken)
    # With something free and something that fits first in order, somebody enters.
    first = order(entries)[0] if entries else None
    if first is not None and places and needs[first.number] <= blocks:
        assert entered
