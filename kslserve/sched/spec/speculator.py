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
    Kept,
)
from kslserve.sched.spec.allowance import Allowance
from kslserve.sched.spec.charge import charge, drafts_took
from kslserve.sched.spec.choice import Candidate, Choice, output_left
from kslserve.sched.spec.cost import CLIP, PACE_MAX, WaveCosts
from kslserve.sched.spec.drafter import ASLEEP_MAX, Drafter
from kslserve.sched.spec.oracle import Oracle
from kslserve.sched.spec.patience import Patience
from kslserve.sched.spec.policy import SpecPolicy

_log = log.get("spec")
IDLE_MS = 5.0  # a wave that came so long after the one before was not waited for
# A plain wave with a look in front, or soon behind drafts, takes longer than where nobody drafts:
# caches hold other things.
SETTLED = 2
NOTHING = (0.0, 0.0)


class Speculator:
    """mixed: times of waves with prompts. clock: seconds."""

    def __init__(
        self,
        policy: SpecPolicy,
        info: EngineInfo,
        mixed: WaveCost,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.costs = WaveCosts()
        self._clock = clock
        self._columns = info.wave_columns
        mtp = policy.mtp and info.has_mtp
        self._matches = Averages(MATCH_PRIOR) if policy.ngram else None
        self._chain = Averages(DEPTH_PRIOR, DEPTH_WEIGHT) if mtp else None
        self._lanes = min(policy.lanes, DRAFT_MAX)
        self._kept = Kept()
        depth = policy.depth if mtp else 0
        self._choice = Choice(self.costs, mixed, self._kept, self._lanes, depth)
        self._allowance = Allowance()
        self._patience = Patience()
        self.nap_until = 0  # id of the wave before which all drafters sleep
        self._wave = 0  # the one that was looked at last
        self._looked = 0  # the same but for waves that had to be plain
        self.watched = 0  # the last wave that tells what drafts before it cost
        drafts = metrics.labelled(
            "drafts_total", "Drafts that were verified, and those of them accepted", "kind"
        )
        kinds = ("mtp", "mtp_accepted", "ngram", "ngram_accepted")
        self._drafts = [drafts[kind] for kind in kinds]
        self._round: list[tuple[Drafter, int, int, RowDone]] = []  # of the wave applied last
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

    def look(self, sequences: Items[Sequence], wave: int) -> None:
        """While the wave before it runs, and has no drafts: where what was sampled so far promises
        nothing for this wave, nobody is looked at before it is sent, when it would wait for that.
        sequences: as in `draft`."""
        rows = len(sequences)
        if self.policy.always or self.costs.of(rows).plain_due:
            return
        begun = self._clock()
        self._wave = self._looked = wave
        drafting, least = self._awake(sequences, wave)
        if drafting is not None and not self._promised(drafting, least):
            self._doze(drafting)
            self._nap(sequences)
            self.costs.looked(1e3 * (self._clock() - begun), self.costs.of(rows).ms(rows))

    def draft(self, sequences: Items[Sequence], wave: int) -> bool:
        """Aim the drafters of sequences that all just decode, in rows that stand; whether any of
        them drafts. Most looks find nothing, and they are far between where they take a part of
        the time that counts. wave: the next one."""
        begun = self._clock()
        self._wave = wave
        rows, always = len(sequences), self.policy.always
        costs = self.costs.of(rows)
        if costs.plain_due and not always:
            for sequence in sequences:
                if sequence.drafter is not None:
                    sequence.drafter.rest()
            self.nap_until = 0
            return False
        self._looked = wave
        if (always or not self._allowance.waves(rows, wave)) and self._stands(sequences):
            return True
        drafting, least = self._awake(sequences, wave)
        if drafting is None:
            return False
        self._choose(drafting, rows, False, self._columns - rows, least)
        found = self._settled(sequences, drafting)
        if not found and not always:
            ms, plain_ms = 1e3 * (self._clock() - begun), costs.ms(rows)
            self.costs.looked(ms, plain_ms)
            self._allowance.settle(rows, -min(ms / plain_ms, 1.0))
        return found

    def _awake(
        self, sequences: Items[Sequence], wave: int
    ) -> tuple[list[Candidate] | None, tuple[float, float]]:
        """Those of decoding sequences that may draft in that wave, up to date, and what they have
        to promise. None where nobody may for some waves, which are slept through."""
        rows = len(sequences)
        least = self._least(rows)
        pause = 0 if self.policy.always else self._allowance.waves(rows, wave)
        if min(least) >= 1.0:
            pause = PACE_MAX  # beside so many rows no draft is worth its column, however sure it is
        drafting: list[Candidate] = []
        for sequence in sequences:
            drafter = sequence.drafter
            if drafter is None:
                continue
            drafter.rest()
            if pause:
                drafter.held = []
            elif drafter.live and drafter.asleep_until <= wave:
                drafter.read(sequence)
                drafting.append((sequence, drafter, True))
        if pause:
            self.nap_until = wave + min(pause, PACE_MAX)
            return None, least
        return drafting, least

    def _stands(self, sequences: Items[Sequence]) -> bool:
        """Have all verify as many drafts as in the wave before, if nothing else would be chosen:
        choosing takes a part of a wave that counts."""
        for sequence in sequences:
            if sequence.drafter is None or not sequence.drafter.stands:
                return False
        for sequence in sequences:
            drafter = sequence.drafter
            assert drafter is not None
            drafter.read(sequence)
            if not drafter.again(output_left(sequence) - 1):
                return False
        return True

    def awake(self, sequences: Items[Sequence], wave: int) -> bool:
        """Whether any of them may draft in that wave."""
        return wave >= self.nap_until and any(
            s.drafter is not None and s.drafter.live and s.drafter.asleep_until <= wave
            for s in sequences
        )

    def plan(
        self, running: Items[Sequence], grants: Items[int], left: Items[int], room: int, wave: int
    ) -> bool:
        """The same for any wave: aims those that will sample in it.

        grants: columns by sequence; left: prompt positions to compute, 0 for a decoding one. room:
        further columns that the wave can have."""
        self._wave = self._looked = wave
        prompt = any(n and remaining for n, remaining in zip(grants, left, strict=True))
        rows = len(running) if prompt else sum(map(bool, grants))
        pause = not self.policy.always and self._allowance.waves(rows, wave)
        drafting: list[Candidate] = []
        for sequence, n, remaining in zip(running, grants, left, strict=True):
            if not n:
                continue
            drafter = sequence.drafter
            if drafter is not None:
                drafter.rest()
                if pause:
                    drafter.held = []
                elif drafter.live and drafter.asleep_until <= wave and n >= remaining:
                    drafter.read(sequence)
                    drafting.append((sequence, drafter, not remaining))
        if pause:
            return False
        self._choose(drafting, rows, prompt, room, self._least(rows))
        return self._settled(running, drafting)

    def _least(self, rows: int) -> tuple[float, float]:
        """What drafts have to promise; nothing while it is not known what waves cost."""
        if self.policy.always or self.costs.of(rows).plain_due:
            return NOTHING
        return self._choice.least(rows)

    def _choose(
        self,
        drafting: Items[Candidate],
        rows: int,
        prompt: bool,
        room: int,
        least: tuple[float, float],
    ) -> None:
        """Aim drafters, or put them to sleep where none of them promises at least so much."""
        if self.policy.always:
            self._choice.always(drafting, room, self._wave)
        elif self._promised(drafting, least):
            self._choice.aim(drafting, rows, prompt, room, self._wave)
        else:
            self._doze(drafting)

    def _promised(self, drafting: Items[Candidate], least: tuple[float, float]) -> bool:
        """Whether any of them promises at least so much."""
        first, first_own = least
        return any(drafter.promises(first, first_own, self._wave) for _, drafter, _ in drafting)

    def _doze(self, drafting: Items[Candidate]) -> None:
        for _, drafter, decodes in drafting:
            if decodes:
                drafter.doze(self._wave, self.costs.pace)

    def _settled(self, sequences: Items[Sequence], drafting: Items[Candidate]) -> bool:
        """Whether any of the drafters that were aimed drafts; where none does, all may sleep."""
        for _, drafter, _ in drafting:
            if drafter.engaged:
                self.nap_until = 0
                return True
        self._nap(sequences)
        return False

    def _nap(self, sequences: Items[Sequence]) -> None:
        """Nobody is looked at before the first of them wakes."""
        live = (s.drafter for s in sequences if s.drafter is not None and s.drafter.live)
        wakes = [drafter.asleep_until for drafter in live]
        self.nap_until = min(wakes, default=self._wave + ASLEEP_MAX)

    # ------------------------------------------------------------ after a wave

    def learn(self, sequence: Sequence, drafter: Drafter, result: RowDone) -> None:
        """What a row of the wave sampled of a sequence whose drafts are engaged."""
        lanes, propose = len(drafter.lanes), drafter.propose
        if not result.tokens and not lanes:
            return
        if lanes or propose:
            self._round.append((drafter, lanes, propose, result))
        if lanes:
            mtp, mtp_accepted, ngram, ngram_accepted = self._drafts
            own, own_accepted = drafter.own, min(result.accepted, drafter.own)
            if not (result.stop or result.latched):
                self._kept.note(sum(drafter.survival[:lanes]), result.accepted)
            mtp.value += own
            mtp_accepted.value += own_accepted
            ngram.value += lanes - own
            ngram_accepted.value += result.accepted - own_accepted
        if drafter.learn(result):
            self._stepped(sequence, drafter)

    def wave(self, done: Done, since_ns: int, rows: int, columns: int, plain: bool) -> None:
        """Times of a wave. since_ns: since the end of the one before it. plain: it had no prompts
        and moved nothing."""
        round, self._round = self._round, []
        if done.drafts_ns:
            drafts_took(self.costs, done, round)
        idle_ns = since_ns - (done.ended_ns - done.started_ns)
        if not plain or not rows or idle_ns > IDLE_MS * 1e6:
            return
        ms = (since_ns - done.drafts_ns) / 1e6
        costs = self.costs.of(rows)
        if columns > rows or done.drafts_ns:
            self.watched = done.wave + SETTLED
            excess = costs.observe(columns, ms, done.wave)
            if costs.known:
                saved = charge(costs, done, round, rows, excess, self._wave)
                costs.saved += saved
                self._allowance.settle(rows, saved - costs.beyond)
        elif done.wave <= self.watched and costs.known:
            # What drafts leave in caches, the wave behind them pays for.
            lost = min(ms / costs.ms(rows), CLIP) - 1.0
            costs.saved -= lost
            self._allowance.settle(rows, -lost)
        elif done.wave > self._looked + SETTLED:
            owed = costs.plain(ms, done.wave)
            if owed is not None:
                self._allowance.correct(rows, owed)

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
