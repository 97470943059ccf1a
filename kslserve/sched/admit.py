"""Admission policy: who enters next, and whether it fits. Pure functions of values.

A request enters when a slot, a slab and the blocks of its whole prompt and output are free, so
nothing can run out of memory half way. Order: lower priority number, then side requests, then
arrival. Where the first in order does not fit, side requests behind it may still enter. Ageing
bounds both kinds of overtaking: a request that was overtaken OVERTAKES_MAX times goes before all
others and nobody passes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

OVERTAKES_MAX = 16


@dataclass(frozen=True, slots=True)
class Waiting:
    """One queued request. number orders arrivals; blocks: what it reserves; overtaken: how many
    later arrivals entered before it."""

    number: int
    priority: int
    side: bool
    blocks: int
    overtaken: int


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


def admit(queue: Iterable[Waiting], places: int, blocks: int) -> list[int]:
    """Numbers of the requests that enter now, in order, given free places (slots and slabs) and
    free blocks. The caller adds what this call lets overtake to the counts of those who stay."""
    waiting = list(queue)
    entered: list[int] = []
    while len(entered) < places:
        chosen = _choose(waiting, blocks)
        if chosen is None:
            break
        entered.append(chosen.number)
        blocks -= chosen.blocks
        waiting = [
            replace(w, overtaken=w.overtaken + 1) if w.number < chosen.number else w
            for w in waiting
            if w is not chosen
        ]
    return entered


def _choose(waiting: list[Waiting], blocks: int) -> Waiting | None:
    """Who enters next, or None."""
    ordered = order(waiting)
    if not ordered or ordered[0].blocks <= blocks:
        return ordered[0] if ordered else None
    if ordered[0].overtaken >= OVERTAKES_MAX:
        return None
    return next((w for w in ordered if w.side and w.blocks <= blocks), None)
