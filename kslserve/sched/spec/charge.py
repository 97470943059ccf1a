"""What drafts took, charged to those that drafted."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kslserve.engine.types import Done
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.cost import RowCosts, WaveCosts

CLIP = 1.5  # drafts are charged with at most so many times what their wave was expected to take


def drafts_took(costs: WaveCosts, done: Done, sequences: Items[Sequence]) -> None:
    """Time the MTP drafts that were made beside a wave."""
    drafting = steps = 0
    for sequence, result in zip(sequences, done.rows, strict=True):
        drafter = sequence.drafter
        if drafter is not None and drafter.propose:
            drafting += 1
            steps = max(steps, min(drafter.propose, len(result.drafts) + 1))
    if steps:
        costs.drafted(drafting, steps, done.drafts_ns / 1e6)


def charge(
    costs: RowCosts, done: Done, sequences: Items[Sequence], columns: int, ms: float, wave: int
) -> None:
    """Settle with each drafter what its drafts saved and what the wave, which took `ms` beside the
    making of MTP drafts, took beyond a plain one. wave: id of the newest wave."""
    rows, plain = len(sequences), costs.ms(len(sequences))
    # A wave that something else held up says nothing about drafts.
    took = min(ms, CLIP * costs.ms(columns)) + done.drafts_ns / 1e6
    drafters = [s.drafter for s in sequences]
    shares = [len(d.lanes) + d.propose if d is not None else 0 for d in drafters]
    each = max(0.0, took / plain - 1.0) / max(sum(shares), 1)
    for drafter, share, result in zip(drafters, shares, done.rows, strict=True):
        if drafter is not None and share:
            drafter.settle(result.accepted / rows - each * share, wave)
