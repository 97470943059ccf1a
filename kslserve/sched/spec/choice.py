"""Choice: how much each of the drafters of a wave is to draft, given what waves cost."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from kslserve.sched.plan import WaveCost
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.acceptance import Kept
from kslserve.sched.spec.cost import RowCosts, WaveCosts
from kslserve.sched.spec.depth import GAIN, STAY, TRUST_CHAIN, choose_depths, choose_lanes
from kslserve.sched.spec.drafter import Drafter

LANES_MAX = 60  # most drafts of a wave; more never pay, and choosing takes time
Candidate = tuple[Sequence, Drafter, bool]  # whether it decodes, or its prompt ends
Times = Callable[[int], float]  # ms of a wave by its decode columns


class Choice:
    """costs, mixed: times of waves without and with prompts. kept: of the drafts of the past.
    lanes: most drafts of a row; depth: most of those that MTP makes, 0 without a head."""

    __slots__ = ("_costs", "_depth", "_kept", "_lanes", "_mixed")

    def __init__(
        self, costs: WaveCosts, mixed: WaveCost, kept: Kept, lanes: int, depth: int
    ) -> None:
        self._costs = costs
        self._kept = kept
        self._mixed = mixed
        self._lanes = lanes
        self._depth = min(depth, lanes)

    def least(self, rows: int) -> tuple[float, float]:
        """Probabilities that the first draft of the index, and of MTP, must have if drafts are to
        gain anything beside so many rows."""
        costs = self._costs.of(rows)
        gain = _gain(costs)
        least, plain = costs.table(self._most(rows), gain)[1], costs.ms(rows)
        step_ms = self._costs.draft_ms(rows, plain)
        return least / self._kept.part, (least + gain * step_ms / plain) / TRUST_CHAIN

    def aim(
        self, drafting: Items[Candidate], rows: int, prompt: bool, room: int, wave: int
    ) -> None:
        """Choose for a wave in which so many rows decode. room: further columns that it can have.

        prompt: whether it has prompts. Their time passes whoever drafts, so drafts beside them are
        weighed as in the waves that follow, in which all that run decode: those are `rows`. A token
        that comes before them saves its part of one of those, and no more."""
        ms = self._times(rows, prompt)
        lanes = self._choose_lanes(drafting, ms, rows, room)
        depths = self._choose_depths(drafting, ms, rows)
        for candidate, n, depth in zip(drafting, lanes, depths or lanes, strict=True):
            sequence, drafter, decodes = candidate
            if depths is None:
                drafter.aim(n, 0, 0, wave)
                continue
            drafter.aim(n, depth, min(self._depth, output_left(sequence) - 2 - n), wave)
            if decodes:
                drafter.doze(wave, self._costs.pace)

    def always(self, drafting: Items[Candidate], room: int, wave: int) -> None:
        """Have all draft as much as they can."""
        for sequence, drafter, decodes in drafting:
            left = output_left(sequence)
            drafter.offer(min(self._lanes, left - 1, room) if decodes else 0, least=0.0)
            n = len(drafter.survival)
            room -= n
            most = max(0, min(self._depth, left - 2 - n))
            drafter.aim(n, most, most, wave)

    def _choose_lanes(
        self, drafting: Items[Candidate], ms: Times | None, rows: int, room: int
    ) -> list[int]:
        if ms is None:
            for _, drafter, _ in drafting:
                drafter.offer(0)
            return [0] * len(drafting)
        survival: list[list[float]] = []
        for sequence, drafter, decodes in drafting:
            # A round gives one token more than it accepts drafts.
            drafter.offer(min(self._lanes, output_left(sequence) - 1) if decodes else 0)
            survival.append(drafter.survival)
        costs = self._costs.of(rows)
        if not any(survival):
            costs.gain = 1.0
            return [0] * len(drafting)
        most = min(room, self._most(rows))
        lanes, costs.gain = choose_lanes(survival, ms, rows, most, _gain(costs), self._kept.part)
        return lanes

    def _choose_depths(
        self, drafting: Items[Candidate], ms: Times | None, rows: int
    ) -> list[int] | None:
        """None where there is nothing to weigh them by."""
        if ms is None:
            return None
        chances = [
            drafter.chances(min(self._depth, output_left(sequence) - 2))
            for sequence, drafter, _ in drafting
        ]
        if not any(chances):
            return [0] * len(drafting)
        plain = ms(rows)
        return choose_depths(
            chances, ms, lambda n: self._costs.draft_ms(n, plain), rows, self._most(rows)
        )

    def _times(self, rows: int, prompt: bool) -> Times | None:
        """None where there is nothing to go by, or where it is time to see how long a plain wave
        takes, which waves with prompts do not tell."""
        costs = self._costs.of(rows)
        if not costs.known or (costs.plain_due and not prompt):
            return None
        times, plain = costs.table(self._most(rows), _gain(costs))[0], costs.ms(rows)
        if not prompt:
            return lambda columns: plain * times[columns - rows]
        # Where products are bound by arithmetic, columns cost more than beside few others.
        slope = self._mixed.line()[1]
        return lambda columns: max(plain * times[columns - rows], plain + slope * (columns - rows))

    def _most(self, rows: int) -> int:
        """Drafts that a wave may have beside so many rows."""
        return min(rows * self._lanes, LANES_MAX)


def _gain(costs: RowCosts) -> float:
    """That drafts have to promise."""
    return STAY if costs.gain > 1.0 else GAIN


def output_left(sequence: Sequence) -> int:
    return sequence.limit - len(sequence.output)
