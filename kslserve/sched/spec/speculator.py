"""Speculator: decides for every wave who drafts and how much, and keeps what it learns from all.

Drafts are lossless whatever they are: a draft counts only where it is the token that sampling gives
there. So everything here is about time, and the rule is that plain decode is never slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from kslserve import log
from kslserve.engine.types import DRAFT_MAX, Done, EngineInfo, RowDone
from kslserve.metrics import Metrics
from kslserve.sched.plan import WaveCost
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.acceptance import (
    DEPTH_PRIOR,
    DEPTH_WEIGHT,
    MATCH_PRIOR,
    Averages,
)
from kslserve.sched.spec.charge import charge, drafts_took
from kslserve.sched.spec.cost import WaveCosts
from kslserve.sched.spec.depth import GAIN, TRUST, TRUST_CHAIN, choose_depths, choose_lanes
from kslserve.sched.spec.drafter import ASLEEP_MAX, Drafter
from kslserve.sched.spec.oracle import Oracle
from kslserve.sched.spec.patience import Patience
from kslserve.sched.spec.policy import SpecPolicy

_log = log.get("spec")
IDLE_MS = 5.0  # a wave that came so long after the one before was not waited for
LANES_MAX = 60  # most drafts of a wave; more never pay, and choosing takes time


class Speculator:
    """mixed: times of waves with prompts."""

    def __init__(
        self, policy: SpecPolicy, info: EngineInfo, mixed: WaveCost, metrics: Metrics
    ) -> None:
        self.policy = policy
        self.costs = WaveCosts()
        self._mixed = mixed
        mtp = policy.mtp and info.has_mtp
        self._matches = Averages(MATCH_PRIOR) if policy.ngram else None
        self._chain = Averages(DEPTH_PRIOR, DEPTH_WEIGHT) if mtp else None
        self._lanes = min(policy.lanes, DRAFT_MAX)
        self._depth = min(policy.depth, self._lanes)
        self._patience = Patience()
        self.nap_until = 0  # id of the wave before which all drafters sleep
        self._wave = 0  # the one that was planned, or looked at, last
        self._planned = 0  # and the last one that was planned
        self._drafts = metrics.labelled(
            "drafts_total", "Drafts that were verified, and those of them accepted", "kind"
        )
        self._events = metrics.labelled(
            "speculation_events_total", "Sequences that draft less from then on", "kind"
        )

    def enter(self, sequence: Sequence) -> None:
        """A sequence was admitted, perhaps again."""
        if sequence.drafter is not None:
            sequence.drafter.held = []  # they were the slot's
        elif sequence.job.guide is None:
            rate, forced = self.policy.oracle, sequence.job.forced
            if rate is None or forced is None:
                sequence.drafter = Drafter(self._matches, self._chain, self._patience, self._lanes)
            else:
                sequence.drafter = Oracle(self._chain, self._patience, self._lanes, forced, rate)

    # ------------------------------------------------------------ before a wave

    def wants(self, sequences: Items[Sequence], wave: int) -> bool:
        """Whether a wave in which all these just decode is worth a plan with drafts. Most waves are
        not, and looking is all that they cost. wave: its id."""
        self._wave = wave
        rows = len(sequences)
        costs = self.costs.of(rows)
        if self.policy.always:
            return self.awake(sequences, wave)
        if costs.plain_due:
            return False
        times, least = costs.table(self._most(rows), GAIN)
        # Tokens that the first draft of the index, and of MTP, must promise.
        step_ms = self.costs.draft_ms(rows, times[rows])
        least_own = (least + GAIN * step_ms / times[rows]) / TRUST_CHAIN
        least /= TRUST
        found = False
        matched: list[tuple[Sequence, Drafter, bool]] = []
        chained: list[tuple[Sequence, Drafter, bool]] = []
        for sequence in sequences:
            drafter = sequence.drafter
            if drafter is not None and drafter.live and drafter.asleep_until <= wave:
                drafter.read(sequence)
                if drafter.matched(least):
                    matched.append((sequence, drafter, True))
                elif drafter.trying(wave):
                    found = True
                elif drafter.hopeful(least_own, wave):
                    chained.append((sequence, drafter, True))
                else:
                    drafter.doze(wave)
        # What one of them promises at first is rarely what all that it promises is worth.
        ms = times.__getitem__
        if not found and matched:
            found = any(self._choose_lanes(matched, ms, rows, self._most(rows)))
        if not found and chained:
            found = any(self._choose_depths(chained, ms, rows) or ())
            if not found:
                for _, drafter, _ in chained:
                    drafter.wait(wave)
        if found:
            self.nap_until = 0
            return True
        for _, drafter, _ in (*matched, *chained):
            drafter.doze(wave)
        live = [s.drafter for s in sequences if s.drafter is not None and s.drafter.live]
        self.nap_until = min((d.asleep_until for d in live), default=wave + ASLEEP_MAX)
        return False

    def awake(self, sequences: Items[Sequence], wave: int) -> bool:
        """Whether any of them may draft in that wave."""
        return any(
            s.drafter is not None and s.drafter.live and s.drafter.asleep_until <= wave
            for s in sequences
        )

    def plan(
        self, running: Items[Sequence], grants: Items[int], left: Items[int], room: int, wave: int
    ) -> bool:
        """Aim the drafters of those that will sample in the next wave; whether any of them drafts.

        grants: columns by sequence; left: prompt positions to compute, 0 for a decoding one. room:
        further columns that the wave can have."""
        self._wave = self._planned = wave
        self.nap_until = 0
        rows = prompt = 0
        drafting: list[tuple[Sequence, Drafter, bool]] = []
        for sequence, n, remaining in zip(running, grants, left, strict=True):
            if not n:
                continue
            if remaining:
                prompt += n
            else:
                rows += 1
            drafter = sequence.drafter
            if drafter is not None:
                drafter.rest()
                if drafter.live and drafter.asleep_until <= self._wave and n >= remaining:
                    drafter.read(sequence)
                    drafting.append((sequence, drafter, not remaining))
        if not drafting:
            return False
        if self.policy.always:
            self._plan_always(drafting, room)
            return any(drafter.engaged for _, drafter, _ in drafting)
        finishing = sum(not decodes for _, _, decodes in drafting)
        ms = self._time_of(rows, prompt)
        lanes = self._choose_lanes(drafting, ms, rows, room)
        # They are for the wave after this one, in which the prompts that end here decode too.
        after = self._time_of(rows + finishing, 0) if prompt else ms
        depths = self._choose_depths(drafting, after, rows + finishing)
        for (sequence, drafter, _), n, depth in zip(drafting, lanes, depths or lanes, strict=True):
            if depths is None:  # nothing to weigh them by
                drafter.aim(n, 0, 0, wave)
                continue
            drafter.aim(n, depth, min(self._depth, _output_left(sequence) - 2 - n), wave)
            drafter.doze(wave)
        return any(drafter.engaged for _, drafter, _ in drafting)

    def _choose_lanes(
        self,
        drafting: Items[tuple[Sequence, Drafter, bool]],
        ms: Callable[[int], float] | None,
        rows: int,
        room: int,
    ) -> list[int]:
        if ms is None:
            for _, drafter, _ in drafting:
                drafter.offer(0)
            return [0] * len(drafting)
        survival: list[list[float]] = []
        for sequence, drafter, decodes in drafting:
            # A round gives one token more than it accepts drafts.
            drafter.offer(min(self._lanes, _output_left(sequence) - 1) if decodes else 0)
            survival.append(drafter.survival)
        if not any(survival):
            return [0] * len(drafting)
        return choose_lanes(survival, ms, rows, min(room, self._most(rows)))

    def _choose_depths(
        self,
        drafting: Items[tuple[Sequence, Drafter, bool]],
        ms: Callable[[int], float] | None,
        rows: int,
    ) -> list[int] | None:
        if ms is None:
            return None
        if self._chain is None:
            return [0] * len(drafting)
        chances = [
            drafter.chances(min(self._depth, _output_left(sequence) - 2))
            for sequence, drafter, _ in drafting
        ]
        if not any(chances):
            return [0] * len(drafting)
        plain = ms(rows)
        return choose_depths(
            chances, ms, lambda n: self.costs.draft_ms(n, plain), rows, self._most(rows)
        )

    def _plan_always(self, drafting: Items[tuple[Sequence, Drafter, bool]], room: int) -> None:
        for sequence, drafter, decodes in drafting:
            left = _output_left(sequence)
            drafter.offer(min(self._lanes, left - 1, room) if decodes else 0, least=0.0)
            n = len(drafter.tokens)
            room -= n
            most = max(0, min(self._depth, left - 2 - n))
            drafter.aim(n, most if self._chain is not None else 0, most, self._wave)

    def _time_of(self, rows: int, prompt: int) -> Callable[[int], float] | None:
        """Expected time of a wave by its decode columns; None where there is nothing to go by, or
        where it is time to see how long a plain one takes."""
        if prompt:
            base, slope = self._mixed.line()
            if base + slope <= 0.0:
                return None
            return lambda columns: base + slope * (prompt + columns)
        costs = self.costs.of(rows)
        if costs.plain_due:
            return None
        return costs.table(self._most(rows), GAIN)[0].__getitem__

    def _most(self, rows: int) -> int:
        """Drafts that a wave may have beside so many rows."""
        return min(rows * self._lanes, LANES_MAX)

    # ------------------------------------------------------------ after a wave

    def learn(self, sequence: Sequence, drafter: Drafter, result: RowDone) -> None:
        """What a row of the wave sampled of a sequence whose drafts are engaged."""
        if not result.tokens and not drafter.lanes:
            return
        stats = drafter.stats
        before = stats.ngram, stats.ngram_accepted, stats.mtp, stats.mtp_accepted
        if drafter.learn(result):
            self._stepped(sequence, drafter)
        if drafter.lanes:
            kinds = self._drafts
            kinds["ngram"].inc(stats.ngram - before[0])
            kinds["ngram_accepted"].inc(stats.ngram_accepted - before[1])
            kinds["mtp"].inc(stats.mtp - before[2])
            kinds["mtp_accepted"].inc(stats.mtp_accepted - before[3])

    def wave(
        self, done: Done, since_ns: int, sequences: Items[Sequence], columns: int, plain: bool
    ) -> None:
        """Times of a wave. since_ns: since the end of the one before it. plain: it had no prompts
        and moved nothing."""
        if done.drafts_ns:
            drafts_took(self.costs, done, sequences)
        idle_ns = since_ns - (done.ended_ns - done.started_ns)
        if not plain or not sequences or idle_ns > IDLE_MS * 1e6:
            return
        rows, ms = len(sequences), (since_ns - done.drafts_ns) / 1e6
        costs = self.costs.of(rows)
        if columns > rows or done.drafts_ns:
            if costs.sure(rows) and (columns == rows or costs.sure(columns)):
                charge(costs, done, sequences, columns, ms, self._wave)
            if columns > rows:
                costs.observe(columns, ms)
        elif done.wave < self.nap_until:
            costs.glance(ms)
        elif done.wave > self._planned + 1:
            # One behind a wave with drafts, or that was planned in vain, is not what plain decode
            # would take.
            costs.observe(columns, ms)

    def refused(self, sequences: Iterable[Sequence]) -> bool:
        """The engine refused a wave. True if there were drafts in it: then they may be the fault,
        and their sequences decode plainly from now on."""
        found = False
        for sequence in sequences:
            drafter = sequence.drafter
            if drafter is not None and (drafter.lanes or drafter.propose):
                found = True
                drafter.rest()
                if drafter.ladder.failed("the engine refused the wave"):
                    self._stepped(sequence, drafter)
        return found

    def _stepped(self, sequence: Sequence, drafter: Drafter) -> None:
        rounds, depth, why = drafter.ladder.events[-1]
        self._events["step_down" if depth else "plain"].inc()
        _log.info("drafts less", sequence=sequence.number, round=rounds, depth=depth, why=why)


def _output_left(sequence: Sequence) -> int:
    return sequence.limit - len(sequence.output)
