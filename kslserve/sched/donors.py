"""Donors: running prompts that a queued one waits for.

Where a running prompt shares a longer beginning with a queued one than any checkpoint does, and has
not passed its end yet, it is asked to leave a checkpoint there and the queued one waits for that:
what both need is computed once. The wait is bounded in time and in the number of prompts waited
for, and ends with the donor."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.hosttier import HostCopy
from kslserve.sched.cache.index import Match, common_prefix
from kslserve.sched.cache.saves import CachePolicy, SavePoint
from kslserve.sched.sequence import Sequence

DONORS_MAX = 4  # running prompts that one sequence waits for, one after the other
DONOR_GAIN = 64  # positions that waiting has to save


class Waiter:
    """What is remembered of a queued sequence between looks. version: of the index at the last
    match. donors: numbers of those it waited for; shared, by donor: how long a beginning is the
    same. since: when it began to wait. pinned: a host copy that was read from disk for it."""

    __slots__ = ("donors", "match", "pinned", "shared", "since", "version")

    def __init__(self) -> None:
        self.match: Match | None = None
        self.version = -1
        self.donors: set[int] = set()
        self.shared: dict[int, int] = {}
        self.since: float | None = None
        self.pinned: HostCopy | None = None


def find_donor(
    sequence: Sequence, waiter: Waiter, start: int, running: Iterable[Sequence], policy: CachePolicy
) -> Sequence | None:
    """The running prompt that shares most with it, beyond `start`, and can still leave a checkpoint
    there, which it is asked to."""
    best, best_end = None, max(start, policy.min_tokens) + DONOR_GAIN - 1
    for donor in _candidates(waiter, running):
        shared = waiter.shared.get(donor.number)
        if shared is None:
            shared = common_prefix(sequence.ids[:-1], donor.ids[:-1])
            waiter.shared[donor.number] = shared
        if shared > best_end and _can_leave(donor, shared, policy.gap):
            best, best_end = donor, shared
    if best is not None:
        _ask(best, best_end, policy.gap)
    return best


def _candidates(waiter: Waiter, running: Iterable[Sequence]) -> Iterable[Sequence]:
    full = len(waiter.donors) >= DONORS_MAX
    for donor in running:
        known = not full or donor.number in waiter.donors
        if known and donor.mark is None and donor.prompt_left:
            yield donor


def _can_leave(donor: Sequence, end: int, gap: int) -> bool:
    """Whether its next rows pass `end`, or a save point close before it."""
    ahead = donor.computed + (donor.row.n if donor.in_flight else 0)
    return ahead < end or _near(donor.saves, end, gap, donor.computed)


def _ask(donor: Sequence, end: int, gap: int) -> None:
    """Have it leave a checkpoint at `end`, unless it will leave one close before."""
    if not _near(donor.saves, end, gap, donor.computed):
        donor.saves = sorted([*donor.saves, SavePoint(end, Kind.JUNCTION)], key=_position)


def _near(saves: Items[SavePoint], end: int, gap: int, after: int) -> bool:
    return any(max(after, end - gap) < p.position <= end for p in saves)


def _position(point: SavePoint) -> int:
    return point.position
