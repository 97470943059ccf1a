"""What drafts took, charged to those that drafted.

What is charged is a round: of each drafter of the wave its drafts that were verified, MTP drafts
that it wanted, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kslserve.engine.types import Done, RowDone
from kslserve.sched.spec.cost import RowCosts, WaveCosts
from kslserve.sched.spec.drafter import Drafter

CLIP = 1.5  # drafts are charged with at most so many times what their wave was expected to take


Round = Items[tuple[Drafter, int, int, RowDone]]


def drafts_took(costs: WaveCosts, done: Done, round: Round) -> None:
    """Time the MTP drafts that were made beside a wave."""
    drafting = steps = 0
    for _, _, propose, result in round:
        if propose:
            drafting += 1
            steps = max(steps, min(propose, len(result.drafts) + 1))
    if steps:
        costs.drafted(drafting, steps, done.drafts_ns / 1e6)


def charge(
    costs: RowCosts, done: Done, round: Round, rows: int, columns: int, ms: float, wave: int
) -> None:
    """Settle with each drafter what its drafts saved and what the wave, which took `ms` beside the
    making of MTP drafts, took beyond a plain one. wave: id of the newest wave."""
    # A wave that something else held up says nothing about drafts.
    took = min(ms, CLIP * costs.ms(columns)) + done.drafts_ns / 1e6
    shares = sum(lanes + propose for _, lanes, propose, _ in round)
    each = max(0.0, took / costs.ms(rows) - 1.0) / max(shares, 1)
    for drafter, lanes, propose, result in round:
        drafter.settle(result.accepted / rows - each * (lanes + propose), wave)
