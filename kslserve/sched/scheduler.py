"""The scheduler: one turn per completed wave, on the event loop's thread.

A turn applies the results, retires memory, admits, plans and submits the next wave, and only then
calls the sinks, so the engine idles for microseconds while text work overlaps with the running
wave. Owner of all sequences and, through Memory, of the engine's pools. The steps are in `results`
(apply), `roster` (who enters and ends), `outgoing` (plan), `flights` (submit) and `fanout`
(sinks)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kslserve import log
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Done, Engine
from kslserve.errors import EnginePoisoned, KslError, QueueFull, Unavailable
from kslserve.metrics import Metrics
from kslserve.sched.ahead import Ahead
from kslserve.sched.cache.diskstore import Scan
from kslserve.sched.cache.disktier import Disk
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.deadlines import CallLater, Deadlines, Timer
from kslserve.sched.flights import Flights
from kslserve.sched.idle import IdleMemory
from kslserve.sched.job import Job as Job
from kslserve.sched.job import Sink as Sink
from kslserve.sched.limits import SchedLimits as SchedLimits
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.memory import Memory
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.plan import WaveCost
from kslserve.sched.results import Results
from kslserve.sched.roster import Roster
from kslserve.sched.sequence import Sequence as Sequence
from kslserve.sched.snapshot import Snapshot, look
from kslserve.sched.spec.speculator import Speculator

_log = log.get("sched")
RETRY_AFTER_S = 2
FLUSH_TICK_S = 0.002
STARTING = "The server is starting."
STOPPING = "The server is shutting down."


class Scheduler:
    """`engine` is open and not started; its pools are taken over whole. clock: seconds. call_later:
    (delay_s, callback) -> Timer, the running loop's unless given. on_fatal: called once, with the
    engine's text, after everything was ended."""

    def __init__(
        self,
        engine: Engine,
        limits: SchedLimits,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
        on_fatal: Callable[[str], None] | None = None,
    ) -> None:
        info = engine.info
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._given_call_later = call_later
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_fatal = on_fatal
        self._metrics = SchedMetrics(metrics)
        memory = self._memory = Memory(info, limits.max_seqs, limits.context)
        cache = self.cache = PrefixCache(memory, info, limits.cache, lambda: self._outgoing.id)
        cache.tiers.on_change = self._cache_changed
        most = max(1, min(limits.wave_columns, info.wave_columns))
        cost = WaveCost(limits.wave_target_ms, limits.decode_gap_ms, most)
        speculator = None
        if limits.spec is not None:
            speculator = Speculator(limits.spec, info, cost, metrics, clock)
        outgoing = self._outgoing = Outgoing(memory, cache, speculator)
        self._deadlines = Deadlines(
            limits.queue_timeout_s, limits.request_timeout_s, self._turn, self._call_later
        )
        roster = self._roster = Roster(
            memory, cache, outgoing, self._deadlines, self._metrics, clock, self._call_turn
        )
        self._results = Results(roster, memory, cache, outgoing, cost, self._metrics, speculator)
        self._flights = Flights(
            engine, roster, cache, outgoing, cost, self._metrics, clock,
            self._call_turn, self._mask_ready, self._die,
        )  # fmt: skip
        self._idle_memory = IdleMemory(
            memory,
            cache,
            Ahead(memory, info, limits.ahead_bytes),
            limits.idle_return_s,
            self._call_later,
            self._flights.send_ops,
            self._call_turn,
        )
        self._numbers = 0
        self._turn_timer: Timer | None = None
        self._refusal: str | None = STARTING
        self._fatal: str | None = None
        self._closed = False
        self._idle_waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------ for callers

    @property
    def window(self) -> int:
        """Most tokens, prompt and output, of one sequence."""
        return self._memory.window

    @property
    def vocab(self) -> int:
        """Width of masks in ids."""
        return self._engine.info.vocab

    @property
    def idle(self) -> bool:
        """Nothing is queued, running, in flight or still to be told."""
        roster = self._roster
        busy = roster.queue or roster.running or self._flights.count
        return not busy and roster.outbox.empty

    def start(self) -> None:
        """Attach the engine to the running loop and accept jobs."""
        self._engine.start(self._on_done)
        if self._given_call_later is None:
            self._loop = asyncio.get_running_loop()
        self._refusal = None

    def submit(self, job: Job, sink: Sink) -> Sequence:
        """Queue a job. Raises QueueFull, ContextLengthExceeded, InvalidRequest, Unavailable (not
        started, draining) or EnginePoisoned; the sink is then never called."""
        if self._fatal is not None:
            raise EnginePoisoned(self._fatal)
        if self._refusal is not None:
            raise Unavailable(self._refusal, retry_after_s=RETRY_AFTER_S)
        job.check(self.window)
        queued, running = len(self._roster.queue), len(self._roster.running)
        if queued >= self._limits.max_queue + self._roster.entrance.places_free():
            raise QueueFull(
                f"{running} requests run and {queued} wait; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._numbers += 1
        sequence = Sequence(self._numbers, job, sink, self._clock())
        room = self.window - len(job.prompt_ids)
        if job.max_new_tokens >= room:
            sequence.limit, sequence.limit_reason = room, FinishReason.WINDOW
        self._roster.enqueue(sequence)
        return sequence

    def cancel(self, sequence: Sequence, error: KslError | None = None) -> None:
        """End a sequence: now, or when its wave completes; later tokens are dropped. The reason is
        CANCELLED. Ending a sequence twice does nothing."""
        self._roster.cancel(sequence, error)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new jobs, let live ones run for `timeout_s`, end the rest with Unavailable and
        wait for the wave in flight."""
        self._refusal = STOPPING
        try:
            await asyncio.wait_for(self._wait_idle(), timeout_s)
        except TimeoutError:
            for sequence in self._roster.live:
                self.cancel(sequence, Unavailable(STOPPING))
            await self._wait_idle()

    def use_disk(self, disk: Disk, scan: Scan) -> None:
        """Give the prefix cache a disk tier. Called before `start`, or soon after it."""
        self.cache.tiers.use_disk(disk, scan)

    async def flush(self, budget_s: float) -> None:
        """After `drain`: write the checkpoints that are worth it to disk, the best ones first, for
        `budget_s` at most."""
        tiers = self.cache.tiers
        if tiers.disk is None or self._fatal is not None:
            return
        tiers.flush()
        until = self._clock() + budget_s
        while self._clock() < until and self._fatal is None:
            if not self._flights.count:
                tiers.start_save()
                if not tiers.busy:
                    break
                self._call_turn()
            await asyncio.sleep(FLUSH_TICK_S)
        tiers.flushing = False

    def close(self) -> None:
        """End everything at once, without waiting for the wave in flight. Idempotent. The engine is
        the caller's to close."""
        if not self._closed:
            self._refusal = STOPPING
            self._closed = True
            self._idle_memory.stop()
            self._abandon(Unavailable(STOPPING))
            self._turn()

    def snapshot(self) -> Snapshot:
        """Counts for health and metrics; brings the metrics up to date."""
        parts = self._memory, self._roster, self._flights, self.cache, self._metrics
        snapshot = look(*parts, now=self._clock(), fatal=self._fatal)
        self._metrics.publish(snapshot)
        return snapshot

    def check(self) -> None:
        """Assert what must hold between any two callbacks. See Roster.check."""
        self._roster.check()

    # ------------------------------------------------------------ the turn

    def _on_done(self, done: Done) -> None:
        """Engine callback: the oldest wave in flight ended."""
        if self._closed or self._fatal is not None:
            return
        self._flights.count -= 1
        if done.error is not None:
            self._die(done.error)
        else:
            self._results.apply(done)
        self._turn()

    def _turn(self) -> None:
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        flights, roster = self._flights, self._roster
        if self._clock() >= self._deadlines.due:
            roster.expire()
        if not flights.count:
            flights.advance()
        if flights.count:
            self._outgoing.look()
        if flights.count == 1 and self._limits.submit_ahead:
            flights.run_ahead()
        self._results.count()
        roster.outbox.tell()
        if self._idle_waiters and self.idle:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()
        if roster.queue or roster.running:
            self._idle_memory.busy()
        elif flights.count or not roster.outbox.empty or self._fatal is not None or self._closed:
            self._idle_memory.stop()
        else:
            self._idle_memory.quiet()

    def _call_turn(self, delay_s: float = 0.0) -> None:
        """A turn soon; requests that arrive together then share a wave."""
        if self._turn_timer is None and not self._closed:
            self._turn_timer = self._call_later(delay_s, self._turn)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        if self._given_call_later is not None:
            return self._given_call_later(delay_s, callback)
        return asyncio.get_running_loop().call_later(delay_s, callback)

    def _mask_ready(self) -> None:
        """Perhaps in another thread."""
        if self._loop is None:
            self._call_turn()
        else:
            self._loop.call_soon_threadsafe(self._turn)

    def _cache_changed(self) -> None:
        """A file was read or written."""
        self._roster.due = True
        self._call_turn()

    # ------------------------------------------------------------ ends

    def _die(self, text: str) -> None:
        """The engine is lost: end everything, refuse everything."""
        self._fatal = self._flights.last_error = text
        self._metrics.events["native_failure"].inc()
        _log.error("engine failed", error=text)
        self._abandon(EnginePoisoned(text))
        if self._on_fatal is not None:
            self._on_fatal(text)

    def _abandon(self, error: KslError) -> None:
        """End everything without waiting for the wave in flight."""
        self._flights.count = 0
        self._roster.abandon(error)

    async def _wait_idle(self) -> None:
        if not self.idle:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter
