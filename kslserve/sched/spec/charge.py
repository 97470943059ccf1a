"""What drafts took, charged to those that drafted.

What is charged is a round: of each drafter of the wave its drafts that were verified, MTP drafts
that it wanted, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kslserve.engine.types import Done, RowDone
from kslserve.sched.spec.cost import RowCosts, WaveCosts
from kslserve.sched.spec.drafter import Drafter
from kslserve.sched.spec.patience import ROUND

Round = Items[tuple[Drafter, int, int, RowDone]]
BEHIND = 2  # waves without MTP drafts that leave next to no keys and values to be made


def drafts_took(costs: WaveCosts, done: Done, round: Round) -> None:
    """Time the MTP drafts that were made beside a wave. Where one of the sequences made none for
    long, or only begins, most of that is the time of keys and values that were left until then, of
    which those behind it have none: it says nothing of what drafts cost."""
    drafting = steps = 0
    behind = False
    for drafter, _, propose, result in round:
        if propose:
            drafting += 1
            steps = max(steps, min(propose, len(result.drafts) + 1))
            behind = behind or done.wave - drafter.proposed > BEHIND
            drafter.proposed = done.wave
    if steps and not behind:
        costs.drafted(drafting, steps, done.drafts_ns / 1e6)


def charge(costs: RowCosts, done: Done, round: Round, rows: int, excess: float, wave: int) -> float:
    """Settle with each drafter what its drafts saved and what the wave took beyond a plain one;
    returns what they saved in all, in plain waves. excess: what such waves take beyond it, MTP
    drafts apart: what held up a single one says nothing of drafts. wave: id of the newest one.

    The first MTP drafts after long also take the time of keys and values that were left until then
    (native/*/mtp_backlog): of that no more counts than of any round."""
    extra = excess + min(done.drafts_ns / 1e6 / costs.ms(rows), ROUND)
    shares = sum(lanes + propose for _, lanes, propose, _ in round)
    each = extra / max(shares, 1)
    for drafter, lanes, propose, result in round:
        drafter.settle(result.accepted / rows - each * (lanes + propose), wave)
    return sum(result.accepted for *_, result in round) / rows - extra
