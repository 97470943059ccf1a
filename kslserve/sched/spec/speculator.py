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
from kslserve.sched.spec.acceptance import DEPTH_PRIOR, MATCH_PRIOR, Averages
from kslserve.sched.spec.cost import WaveCosts
from kslserve.sched.spec.depth import choose_depths, choose_lanes
from kslserve.sched.spec.drafter import Drafter
from kslserve.sched.spec.oracle import Oracle
from kslserve.sched.spec.policy import SpecPolicy

_log = log.get("spec")
GAP_RATE = 1 / 16  # weight of a new gap in the average
GAP_MS_MAX = 5.0  # a longer one is none


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
        self._chain = Averages(DEPTH_PRIOR) if mtp else None
        self._lanes = min(policy.lanes, DRAFT_MAX)
        self._depth = min(policy.depth, self._lanes)
        self._gap_ms = 0.0  # what the host needs between two waves
        self._ended_ns = 0
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
                sequence.drafter = Drafter(self._matches, self._chain, self._lanes)
            else:
                sequence.drafter = Oracle(self._chain, self._lanes, forced, rate)

    # ------------------------------------------------------------ before a wave

    def plan(
        self, running: Items[Sequence], grants: Items[int], left: Items[int], room: int
    ) -> bool:
        """Aim the drafters of those that will sample in the next wave; whether any of them may
        draft in the one after it.

        grants: columns by sequence; left: prompt positions to compute, 0 for a decoding one. room:
        further columns that the wave can have."""
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
                if drafter.live and not drafter.asleep and n >= remaining:
                    drafter.read(sequence)
                    drafting.append((sequence, drafter, not remaining))
        if not drafting:
            return False
        if self.policy.always:
            self._plan_always(drafting, room)
            return True
        finishing = sum(not decodes for _, _, decodes in drafting)
        ms = self._time_of(rows, prompt)
        lanes = self._choose_lanes(drafting, ms, rows, room)
        depths = self._choose_depths(drafting, rows + finishing, prompt)
        for (sequence, drafter, _), n, depth in zip(drafting, lanes, depths, strict=True):
            drafter.aim(n, depth, min(self._depth, _output_left(sequence) - 2 - n))
            drafter.doze()
        return not all(drafter.asleep for _, drafter, _ in drafting)

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
        return choose_lanes(survival, ms, rows, room)

    def _choose_depths(
        self, drafting: Items[tuple[Sequence, Drafter, bool]], rows: int, prompt: int
    ) -> list[int]:
        ms = self._time_of(rows, prompt)
        if self._chain is None or ms is None:
            return [0] * len(drafting)
        chances = [
            drafter.chances(min(self._depth, _output_left(sequence) - 2))
            for sequence, drafter, _ in drafting
        ]
        plain = ms(rows)
        return choose_depths(
            chances, ms, lambda n: self.costs.draft_ms(n, plain), rows, rows * self._lanes
        )

    def _plan_always(self, drafting: Items[tuple[Sequence, Drafter, bool]], room: int) -> None:
        for sequence, drafter, decodes in drafting:
            left = _output_left(sequence)
            drafter.offer(min(self._lanes, left - 1, room) if decodes else 0, least=0.0)
            n = len(drafter.tokens)
            room -= n
            most = max(0, min(self._depth, left - 2 - n))
            drafter.aim(n, most if self._chain is not None else 0, most)

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
        gap_ms, ms = self._gap_ms, costs.ms
        return lambda columns: gap_ms + ms(columns)

    # ------------------------------------------------------------ after a wave

    def learn(self, sequence: Sequence, drafter: Drafter, result: RowDone) -> bool:
        """What a row of the wave sampled; True if the sequence is to be looked at before the next
        one."""
        if not result.tokens and not drafter.lanes:
            return drafter.live
        if drafter.asleep:
            drafter.asleep -= 1
            return not drafter.asleep
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
        return drafter.live

    def wave(self, done: Done, sequences: Items[Sequence], columns: int, plain: bool) -> None:
        """Times of a wave. plain: it had no prompts and moved nothing."""
        if done.drafts_ns:
            rows = steps = 0
            for sequence, result in zip(sequences, done.rows, strict=True):
                drafter = sequence.drafter
                if drafter is not None and drafter.propose:
                    rows += 1
                    steps = max(steps, min(drafter.propose, len(result.drafts) + 1))
            if steps:
                self.costs.drafted(rows, steps, done.drafts_ns / 1e6)
        if plain and sequences:
            ms = (done.ended_ns - done.started_ns - done.drafts_ns) / 1e6
            self.costs.of(len(sequences)).observe(columns, ms)
            gap_ms = (done.started_ns - self._ended_ns) / 1e6
            if gap_ms < GAP_MS_MAX:
                self._gap_ms += GAP_RATE * (gap_ms - self._gap_ms)
        self._ended_ns = done.ended_ns

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
