"""The scheduler: one turn per completed wave, on the event loop's thread.

A turn applies the results, retires memory, admits, plans and submits the next wave, and only then
calls the sinks, so the engine idles for microseconds while text work overlaps with the running
wave. One wave is in flight at a time, or with submit-ahead a second one while all that runs just
decodes: its rows take the tokens that the first one samples, inside the engine. Owner of all
sequences and, through Memory, of the engine's pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kslserve import log
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Done, Engine, RowDone
from kslserve.errors import (
    BadLogits,
    ContextLengthExceeded,
    EngineError,
    EnginePoisoned,
    InvalidRequest,
    KslError,
    QueueFull,
    Unavailable,
)
from kslserve.metrics import Metrics
from kslserve.sched.cache.diskstore import Scan
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.cache.tiers import Disk
from kslserve.sched.deadlines import CallLater, Deadlines, Timer
from kslserve.sched.entrance import Entrance
from kslserve.sched.fanout import Outbox
from kslserve.sched.limits import SchedLimits as SchedLimits
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.limits import Snapshot as Snapshot
from kslserve.sched.memory import Memory
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.plan import Budget, WaveCost
from kslserve.sched.sequence import Guide, State
from kslserve.sched.sequence import Job as Job
from kslserve.sched.sequence import Sequence as Sequence
from kslserve.sched.sequence import Sink as Sink

_log = log.get("sched")
RETRY_AFTER_S = 2
FLUSH_TICK_S = 0.002
RING_FULL_S = 0.001  # pause before a submit is tried again
GRACE_S = 0.0003  # how long a wave waits for the masks of its rows
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
        self._memory = Memory(info, limits.max_seqs, limits.context)
        self._columns = info.wave_columns
        most = max(1, min(limits.wave_columns, info.wave_columns))
        self._cost = WaveCost(limits.wave_target_ms, limits.decode_gap_ms, most)
        self._deadlines = Deadlines(limits.queue_timeout_s, limits.request_timeout_s, self._turn)
        self._metrics = SchedMetrics(metrics)
        self._outbox = Outbox(self._metrics.ends, self.cancel)
        self._queue: dict[int, Sequence] = {}  # by number, in order of arrival
        self._running: list[Sequence] = []  # in order of admission
        self._numbers = 0
        memory = self._memory
        self.cache = PrefixCache(memory, info, limits.cache, lambda: self._outgoing.id)
        self.cache.tiers.on_change = self._cache_changed
        self._outgoing = Outgoing(memory, self.cache)
        self._entrance = Entrance(memory, self.cache, self._queue, self._running, clock)
        self._flights = 0  # waves in flight
        self._careful = False  # a wave was refused: newcomers come one at a time
        self._admit_due = False  # something changed that may let a queued sequence in
        self._guided = 0  # running sequences with a guide
        self._turn_timer: Timer | None = None
        self._refusal: str | None = STARTING
        self._fatal: str | None = None
        self._closed = False
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._wave_at: float | None = None  # when the last one was sent, or ended
        self._ended_ns = 0  # when the last wave ended, on the engine's clock
        self._last_error: str | None = None
        self._gauge()

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
        return not (self._queue or self._running or self._flights) and self._outbox.empty

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
        prompt = len(job.prompt_ids)
        if prompt < 1 or job.max_new_tokens < 1:
            raise InvalidRequest("A generation needs a prompt and at least one output token.")
        if prompt >= self.window:
            raise ContextLengthExceeded(prompt, self.window)
        if len(self._queue) >= self._limits.max_queue + self._entrance.places_free():
            raise QueueFull(
                f"{len(self._running)} requests run and {len(self._queue)} wait; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._numbers += 1
        sequence = Sequence(self._numbers, job, sink, self._clock())
        room = self.window - prompt
        if job.max_new_tokens >= room:
            sequence.limit, sequence.limit_reason = room, FinishReason.WINDOW
        self._queue[sequence.number] = sequence
        self._deadlines.watch((sequence,), sequence.arrived, self._call_later)
        self._admit_due = True
        self._gauge()
        self._call_turn()
        return sequence

    def cancel(self, sequence: Sequence, error: KslError | None = None) -> None:
        """End a sequence: now, or when its wave completes; later tokens are dropped. The reason is
        CANCELLED. Ending a sequence twice does nothing."""
        if sequence.state is State.ENDED or sequence.mark is not None:
            return
        sequence.mark = (FinishReason.CANCELLED, error)
        self._outgoing.steady = False
        if not sequence.in_flight:
            self._end(sequence)
            self._call_turn()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new jobs, let live ones run for `timeout_s`, end the rest with Unavailable and
        wait for the wave in flight."""
        self._refusal = STOPPING
        try:
            await asyncio.wait_for(self._wait_idle(), timeout_s)
        except TimeoutError:
            for sequence in self._live():
                self.cancel(sequence, Unavailable(STOPPING))
            await self._wait_idle()

    def use_disk(self, disk: Disk, scan: Scan) -> None:
        """Give the prefix cache a disk tier. Called before `start`, or soon after it."""
        self.cache.tiers.disk = disk
        self.cache.tiers.restore(scan)

    async def flush(self, budget_s: float) -> None:
        """After `drain`: write the checkpoints that are worth it to disk, the best ones first, for
        `budget_s` at most."""
        tiers = self.cache.tiers
        if tiers.disk is None or self._fatal is not None:
            return
        tiers.flush()
        until = self._clock() + budget_s
        while self._clock() < until and self._fatal is None:
            if not self._flights:
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
            self._abandon(Unavailable(STOPPING))
            self._turn()

    def snapshot(self) -> Snapshot:
        """Counts for health and metrics; brings the metrics up to date."""
        memory, metrics = self._memory, self._metrics
        age = None if self._wave_at is None else round(self._clock() - self._wave_at, 3)
        snapshot = Snapshot(
            queued=len(self._queue),
            running=len(self._running),
            slots_free=memory.slots.free,
            slots_total=memory.slots.count,
            slabs_free=memory.slabs.free,
            slabs_total=memory.slabs.count,
            blocks_free=memory.available,
            blocks_cached=memory.blocks.evictable,
            blocks_total=memory.blocks.count,
            waves=int(metrics.waves.value),
            in_flight=self._flights > 0,
            wave_age_s=age,
            preemptions=int(metrics.events["preemption"].value),
            prompt_tokens=int(metrics.prompt_tokens.value),
            output_tokens=int(metrics.output_tokens.value),
            cache=self.cache.snapshot(),
            last_error=self._last_error,
            fatal=self._fatal,
        )
        metrics.publish(snapshot)
        return snapshot

    def check(self) -> None:
        """Assert that all memory is free, retired, cached or held by one running sequence, that
        positions are in order, and that nobody who waits holds anything."""
        cache = self.cache
        self._memory.check(self._running, cache.held_slabs(), cache.held_blocks())
        cache.check()
        for s in self._queue.values():
            assert s.state is State.QUEUED, s.describe()
            assert s.slot == s.slab == -1, s.describe()
            assert not s.blocks, s.describe()

    # ------------------------------------------------------------ the turn

    def _on_done(self, done: Done) -> None:
        """Engine callback: the wave in flight ended."""
        if self._closed or self._fatal is not None:
            return
        self._flights -= 1
        if done.error is not None:
            self._die(done.error)
        else:
            self._apply(done)
        self._turn()

    def _turn(self) -> None:
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        if self._clock() >= self._deadlines.due:
            self._expire()
        if not self._flights:
            self._advance()
        if self._flights == 1 and self._limits.submit_ahead:
            self._run_ahead()
        self._outbox.tell()
        if self._idle_waiters and self.idle:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def _apply(self, done: Done) -> None:
        """Move positions, note tokens, end what is finished, free what the wave held."""
        self._memory.complete(done.wave)
        if self.cache.landing and self.cache.complete():
            self._admit_due = True
        if self._outgoing.loaded:
            self._outgoing.complete()
        if self._entrance.waiting:
            self._admit_due = True
        spoken = self._outbox.spoken
        decoding = self._outgoing.columns - self._outgoing.prompt
        prompt = sampled = 0
        for sequence, result in zip(self._outgoing.sequences, done.rows, strict=True):
            if sequence.state is State.ENDED:
                continue  # by the wave before this one; the engine knew, and did nothing
            sequence.in_flight -= 1
            before = sequence.computed
            sequence.computed = position = result.position
            if before < sequence.prompt_tokens:
                prompt += min(position, sequence.prompt_tokens) - before
            tokens = result.tokens
            if sequence.mark is not None:
                sequence.output += tokens
                if not sequence.in_flight:
                    self._end(sequence)
                continue
            if tokens:
                sequence.output += tokens
                sampled += len(tokens)
                spoken.append((sequence, result))
            elif result.logprobs:
                sequence.scored = position
                spoken.append((sequence, result))
            if result.bad_logits:
                text = "The model produced logits that no token can be sampled from."
                sequence.mark = (FinishReason.CANCELLED, BadLogits(text))
            elif result.stop or result.latched:
                sequence.mark = (FinishReason.STOP, None)
            elif len(sequence.output) >= sequence.limit:
                sequence.mark = (sequence.limit_reason, None)
            else:
                guide = sequence.job.guide
                if guide is not None and tokens and self._guide(sequence, guide, result):
                    continue
                if tokens:
                    sequence.aim_decode(tokens[-1])
                    if position >= sequence.room:
                        self._outgoing.steady = False  # it needs its next block
                continue
            self._end(sequence)
        ms = (done.ended_ns - done.started_ns) / 1e6
        if not self._outgoing.moves:
            self._cost.observe(self._outgoing.columns, self._outgoing.prompt, ms)
        metrics = self._metrics
        metrics.wave_ms.observe(ms)
        metrics.waves.inc()
        metrics.prompt_tokens.inc(prompt)
        metrics.output_tokens.inc(sampled)
        if decoding:
            # Each of them had its last token in the wave before.
            metrics.gap_ms.observe((done.ended_ns - self._ended_ns) / 1e6, decoding)
        self._ended_ns = done.ended_ns

    def _advance(self) -> None:
        """Admit, then submit the next wave if there is anything to compute."""
        outgoing = self._outgoing
        while True:
            if self._admit_due:
                self._admit()
            moves = self.cache.tiers.active is not None and self.cache.tiers.ready
            if not self._running and not moves:
                return
            if moves or not outgoing.steady:
                budget = Budget(self._columns, self._cost.chunk)
                if self._guided:
                    self._wait_for_masks()
                outgoing.plan(self._running, budget, one_newcomer=self._careful)
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
                self._outbox.admitted += outgoing.newcomers
                outgoing.sent()
                self._flights += 1
                self._wave_at = self._clock()
                self._careful = self._careful and not outgoing.steady
            else:
                self._call_turn(RING_FULL_S)
            return

    def _run_ahead(self) -> None:
        """Submit the wave after the one in flight, if it is sure to be wanted: the same sequences
        decode, none is at its limit or at the end of its blocks, and nobody waits for a place."""
        outgoing = self._outgoing
        if not outgoing.steady or (self._admit_due and self._queue):
            return
        if self._guided or self.cache.tiers.active is not None:
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
            self._last_error = error.message
            accepted = False
        else:
            if accepted:
                outgoing.sent()
                self._flights += 1
                return
        outgoing.steady = False

    def _guide(self, sequence: Sequence, guide: Guide, result: RowDone) -> bool:
        """Tell a guide of new tokens and append what it forces; True if that ended or re-aimed its
        sequence."""
        forced = guide.advance(result.tokens)
        if not guide.ready or guide.version != sequence.masked:
            self._outgoing.steady = False
        if not forced:
            return False
        if len(sequence.output) + len(forced) >= sequence.limit:
            sequence.mark = (sequence.limit_reason, None)
            self._end(sequence)
            return True
        self._outgoing.steady = False
        sequence.append(forced)
        result.tokens = (*result.tokens, *forced)
        if result.logprobs is not None:
            result.logprobs = [*result.logprobs, *([(token, 0.0)] for token in forced)]
        return True

    def _wait_for_masks(self) -> None:
        """Give late masks a moment. A row whose mask is later sits out this wave."""
        end = time.monotonic() + GRACE_S
        for sequence in self._running:
            guide = sequence.job.guide
            if guide is None or guide.wait(max(0.0, end - time.monotonic())):
                continue
            self._metrics.events["mask_late"].inc()
            guide.when_ready(self._mask_made)

    def _mask_made(self) -> None:
        """Perhaps in another thread."""
        if self._loop is None:
            self._call_turn()
        else:
            self._loop.call_soon_threadsafe(self._turn)

    def _admit(self) -> None:
        self._admit_due = False
        now = self._clock()
        while True:
            sequence = self._entrance.next()
            if sequence is None:
                victim = self._entrance.victim()
                if victim is None:
                    break
                self._preempt(victim)
                continue
            sequence.state = State.RUNNING
            sequence.fresh = True
            sequence.admitted = now
            self._running.append(sequence)
            self._guided += sequence.job.guide is not None
            self._outgoing.steady = False
        self._gauge()

    def _preempt(self, sequence: Sequence) -> None:
        """Checkpoint, release, queue again at its old place."""
        self._running.remove(sequence)
        self._guided -= sequence.job.guide is not None
        self.cache.leave(sequence, keep=True)
        self._memory.take_back(sequence)
        sequence.start_over(self._clock())
        self._queue[sequence.number] = sequence
        by_number = sorted(self._queue.items())
        self._queue.clear()
        self._queue.update(by_number)
        self._deadlines.watch((sequence,), sequence.queued, self._call_later)
        self._outgoing.steady = False
        self._metrics.events["preemption"].inc()

    # ------------------------------------------------------------ ends

    def _end(self, sequence: Sequence, keep: bool = True) -> None:
        """Release its memory; its sink hears of it after the next submit. mark is set. keep: its
        state may become a checkpoint."""
        if sequence.state is State.QUEUED:
            del self._queue[sequence.number]
            self._entrance.forget(sequence)
        else:
            self._running.remove(sequence)
            self._guided -= sequence.job.guide is not None
            self.cache.leave(sequence, keep=keep and self._is_good(sequence))
            self._memory.take_back(sequence)
        sequence.state = State.ENDED
        self._outbox.ended.append(sequence)
        self._outgoing.steady = False
        self._admit_due = True
        self._gauge()

    def _blame(self, error: EngineError) -> None:
        """The engine refused a wave. With several newcomers try one at a time; with one it is its
        fault, since the others ran before; with none, all that had a row end."""
        newcomers = self._outgoing.newcomers
        self._outgoing.steady = False
        if self.cache.tiers.refused():
            return
        if len(newcomers) > 1:
            self._careful = True
            return
        blamed = list(newcomers or self._outgoing.sequences)
        self._last_error = error.message
        self._metrics.events["refused_wave"].inc()
        _log.error("wave refused", error=error.message, sequences=len(blamed))
        for sequence in blamed:
            self.cancel(sequence, error)

    def _die(self, text: str) -> None:
        """The engine is lost: end everything, refuse everything."""
        self._fatal = self._last_error = text
        _log.error("engine failed", error=text)
        self._abandon(EnginePoisoned(text))
        if self._on_fatal is not None:
            self._on_fatal(text)

    def _abandon(self, error: KslError) -> None:
        """End everything without waiting for the wave in flight, which will never be heard of."""
        self._flights = 0
        self.cache.abandon()
        for sequence in self._live():
            if sequence.mark is None:
                sequence.mark = (FinishReason.CANCELLED, error)
            self._end(sequence, keep=False)
        self._memory.complete(self._outgoing.id)
        self._deadlines.stop()
        self._gauge()

    def _expire(self) -> None:
        """End what is too old and wait for the next deadline."""
        now = self._clock()
        self._deadlines.stop()
        for sequence in self._live():
            error = self._deadlines.error(sequence, now)
            if error is not None:
                self.cancel(sequence, error)
        self._deadlines.watch((s for s in self._live() if s.mark is None), now, self._call_later)

    # ------------------------------------------------------------ helpers

    def _live(self) -> list[Sequence]:
        return [*self._queue.values(), *self._running]

    def _cache_changed(self) -> None:
        """A file was read or written."""
        self._admit_due = True
        self._call_turn()

    def _is_good(self, sequence: Sequence) -> bool:
        """Whether its state is what its tokens make it."""
        if sequence.fresh:
            return False
        assert sequence.mark is not None
        return not isinstance(sequence.mark[1], BadLogits)

    def _gauge(self) -> None:
        metrics = self._metrics
        metrics.running.value = len(self._running)
        metrics.queued.value = len(self._queue)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        if self._given_call_later is not None:
            return self._given_call_later(delay_s, callback)
        return asyncio.get_running_loop().call_later(delay_s, callback)

    def _call_turn(self, delay_s: float = 0.0) -> None:
        """A turn soon; requests that arrive together then share a wave."""
        if self._turn_timer is None and not self._closed:
            self._turn_timer = self._call_later(delay_s, self._turn)

    async def _wait_idle(self) -> None:
        if not self.idle:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter
