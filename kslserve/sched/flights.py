"""Flights: the waves in flight, and how the next one gets there.

One wave is in flight at a time, or with submit-ahead a second one while all that runs just decodes:
its rows take the tokens that the first one samples, inside the engine. That saves the engine the
moment between two waves; `startup.pools.submit_ahead` says where it is on."""

from __future__ import annotations

import time
from collections.abc import Callable

from kslserve import log
from kslserve.engine.types import Engine, Progress, StateOp
from kslserve.errors import EngineError, EnginePoisoned
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.plan import Budget, WaveCost
from kslserve.sched.roster import Roster

_log = log.get("sched")
RING_FULL_S = 0.001  # pause before a submit is tried again
GRACE_S = 0.0003  # how long a wave waits for the masks of its rows


class Flights:
    """count: waves in flight. sent_at: clock time when the last one was sent. last_error: what
    the engine said last. wake: asks for a turn after a delay, from the loop; mask_ready: the same
    from any thread. die: called with the engine's text when it is lost."""

    def __init__(
        self,
        engine: Engine,
        roster: Roster,
        cache: PrefixCache,
        outgoing: Outgoing,
        cost: WaveCost,
        metrics: SchedMetrics,
        clock: Callable[[], float],
        wake: Callable[[float], None],
        mask_ready: Callable[[], None],
        die: Callable[[str], None],
    ) -> None:
        self.count = 0
        self.sent_at: float | None = None
        self.last_error: str | None = None
        self._engine = engine
        self._roster = roster
        self._cache = cache
        self._outgoing = outgoing
        self._cost = cost
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self._mask_ready = mask_ready
        self._die = die
        self._columns = engine.info.wave_columns
        self._careful = False  # a wave was refused: newcomers come one at a time

    def progress(self) -> Progress:
        return self._engine.progress()

    def advance(self) -> None:
        """With nothing in flight: admit, then submit the next wave if there is anything to
        compute."""
        outgoing, roster, tiers = self._outgoing, self._roster, self._cache.tiers
        while True:
            if roster.due:
                roster.admit()
            if not roster.running and not tiers.ready:
                return
            if tiers.ready or not (outgoing.steady and outgoing.again()):
                decoding = any(not sequence.prompt_left for sequence in roster.running)
                chunk = self._cost.chunk if decoding else self._cost.alone
                budget = Budget(self._columns, chunk)
                if roster.guided:
                    self._wait_for_masks()
                outgoing.plan(roster.running, budget, one_newcomer=self._careful)
                if outgoing.empty:
                    return
            try:
                accepted = self._engine.submit(outgoing.next())
            except EnginePoisoned as error:
                self._die(error.message)
                return
            except EngineError as error:
                # Nothing was changed. All but the first refusal end a sequence, so the loop ends.
                self._blame(error)
                continue
            if accepted:
                roster.outbox.admitted += outgoing.newcomers
                self._sent()
                self._careful = self._careful and not outgoing.steady
            else:
                self._wake(RING_FULL_S)
            return

    def run_ahead(self) -> None:
        """Submit the wave after the one in flight, if it is sure to be wanted: the same sequences
        decode, none is at its limit or at the end of its blocks, and nobody waits for a place."""
        outgoing, roster = self._outgoing, self._roster
        if not outgoing.steady or (roster.due and roster.queue):
            return
        if outgoing.may_draft:
            return  # what it drafts depends on what the wave in flight samples
        if roster.guided or self._cache.tiers.active is not None:
            return  # the next mask, or the next copy, is the host's to give
        for sequence in outgoing.sequences:
            if sequence.computed + 1 >= sequence.room:
                return
            if len(sequence.output) + 1 >= sequence.limit:
                return
        for sequence in outgoing.sequences:
            sequence.aim_ahead()
        try:
            accepted = self._engine.submit(outgoing.next())
        except EnginePoisoned as error:
            self._die(error.message)
        except EngineError as error:
            # Whatever is wrong is found again, and blamed, when this wave is planned anew.
            self.last_error = error.message
            accepted = False
        else:
            if accepted:
                self._sent()
                return
        outgoing.steady = False

    def send_ops(self, ops: list[StateOp]) -> bool:
        """A wave without rows, with nothing in flight; False if the engine did not take it."""
        outgoing = self._outgoing
        outgoing.plan((), Budget(self._columns, self._columns))
        outgoing.wave.before += ops
        outgoing.moves = True
        try:
            accepted = self._engine.submit(outgoing.next())
        except EnginePoisoned as error:
            self._die(error.message)
            return False
        except EngineError as error:
            self.last_error = error.message
            self._cache.tiers.refused()
            return False
        if accepted:
            self._sent()
        return accepted

    def _sent(self) -> None:
        self._outgoing.sent()
        self.count += 1
        self.sent_at = self._clock()

    def _wait_for_masks(self) -> None:
        """Give late masks a moment. A row whose mask is later sits out this wave."""
        end = time.monotonic() + GRACE_S
        for sequence in self._roster.running:
            guide = sequence.job.guide
            if guide is None or guide.wait(max(0.0, end - time.monotonic())):
                continue
            self._metrics.events["mask_late"].inc()
            guide.when_ready(self._mask_ready)

    def _blame(self, error: EngineError) -> None:
        """The engine refused a wave. With several newcomers try one at a time; with one it is its
        fault, since the others ran before; with none, all that had a row end, unless they drafted:
        then they try again without drafts."""
        newcomers = self._outgoing.newcomers
        self._outgoing.steady = False
        if self._cache.tiers.refused():
            return
        if len(newcomers) > 1:
            self._careful = True
            self._metrics.events["admission_recovery"].inc()
            return
        sequences, speculator = self._outgoing.sequences, self._outgoing.speculator
        if not newcomers and speculator is not None and speculator.refused(sequences):
            return
        blamed = list(newcomers or sequences)
        self.last_error = error.message
        self._metrics.events["admission_failure" if newcomers else "refused_wave"].inc()
        _log.error("wave refused", error=error.message, sequences=len(blamed))
        for sequence in blamed:
            self._roster.cancel(sequence, error)
