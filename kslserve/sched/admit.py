"""Admission policy: who enters next. Pure functions of values.

A request enters when a slot, a slab and the blocks of its whole prompt and output can be had, so
nothing can run out of memory half way. Order: lower priority number, then side requests, then
arrival. Where the first in order does not fit, side requests behind it may still enter, and so
may those of which little is left to compute, such as the next turn of a conversation. A request
that waits for another one's checkpoint steps aside meanwhile. Ageing bounds overtaking: a request
that was overtaken OVERTAKES_MAX times goes before all others and nobody passes it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

OVERTAKES_MAX = 16


@dataclass(frozen=True, slots=True)
class Waiting:
    """One queued request. number orders arrivals; overtaken: how many later arrivals entered before
    it."""

    number: int
    priority: int
    side: bool
    overtaken: int


class Verdict(enum.Enum):
    """FITS: it can enter now. FULL: not before memory is free. WAITS: it would rather wait."""

    FITS = "fits"
    FULL = "full"
    WAITS = "waits"


def order(queue: Iterable[Waiting]) -> list[Waiting]:
    """The queue in the order in which it should enter."""
    return sorted(
        queue,
        key=lambda w: (
            (0, 0, 0, w.number)
            if w.overtaken >= OVERTAKES_MAX
            else (1, w.priority, not w.side, w.number)
        ),
    )


def choose(
    queue: Iterable[Waiting],
    judge: Callable[[Waiting], Verdict],
    is_short: Callable[[Waiting], bool],
) -> Waiting | None:
    """Who enters next, or None. is_short: little of it is left to compute. Asks in order, and only
    as far as it needs answers."""
    head = None
    for waiting in order(queue):
        if head is not None and not (waiting.side or is_short(waiting)):
            continue
        verdict = judge(waiting)
        if verdict is Verdict.FITS:
            return waiting
        if verdict is Verdict.FULL and head is None:
            head = waiting
            if head.overtaken >= OVERTAKES_MAX:
                return None
    return None
