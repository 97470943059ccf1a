"""The scheduler: one turn per completed wave, on the event loop's thread.

A turn applies the results, retires memory, admits, plans and submits the next wave, and only then
calls the sinks, so the engine idles for microseconds while text work overlaps with the running
wave. One wave is in flight at a time. Owner of all sequences and, through Memory, of the engine's
pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kslserve import log
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Done, Engine
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
from kslserve.sched.admit import Waiting, admit
from kslserve.sched.deadlines import CallLater, Deadlines, Timer
from kslserve.sched.fanout import Outbox
from kslserve.sched.limits import SchedLimits as SchedLimits
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.limits import Snapshot as Snapshot
from kslserve.sched.memory import Memory
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.plan import Budget, WaveCost
from kslserve.sched.sequence import Job as Job
from kslserve.sched.sequence import Sequence as Sequence
from kslserve.sched.sequence import Sink as Sink
from kslserve.sched.sequence import State

_log = log.get("sched")
RETRY_AFTER_S = 2
RING_FULL_S = 0.001  # pause before a submit is tried again
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
        self._outgoing = Outgoing()
        self._in_flight = False
        self._careful = False  # a wave was refused: newcomers come one at a time
        self._admit_due = False  # something changed that may let a queued sequence in
        self._turn_timer: Timer | None = None
        self._refusal: str | None = STARTING
        self._fatal: str | None = None
        self._closed = False
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._gauge()

    # ------------------------------------------------------------ for callers

    @property
    def window(self) -> int:
        """Most tokens, prompt and output, of one sequence."""
        return self._memory.window

    @property
    def idle(self) -> bool:
        """Nothing is queued, running, in flight or still to be told."""
        return not (self._queue or self._running or self._in_flight) and self._outbox.empty

    def start(self) -> None:
        """Attach the engine to the running loop and accept jobs."""
        self._engine.start(self._on_done)
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
        if len(self._queue) >= self._limits.max_queue + self._places_free():
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

    def close(self) -> None:
        """End everything at once, without waiting for the wave in flight. Idempotent. The engine is
        the caller's to close."""
        if not self._closed:
            self._refusal = STOPPING
            self._closed = True
            self._abandon(Unavailable(STOPPING))
            self._turn()

    def snapshot(self) -> Snapshot:
        """Counts for health and metrics."""
        return Snapshot(
            queued=len(self._queue),
            running=len(self._running),
            blocks_free=self._memory.blocks.free,
            blocks_total=self._memory.blocks.count,
            waves=int(self._metrics.waves.value),
            in_flight=self._in_flight,
            prompt_tokens=int(self._metrics.prompt_tokens.value),
            output_tokens=int(self._metrics.output_tokens.value),
            fatal=self._fatal,
        )

    def check(self) -> None:
        """Assert that all memory is free, retired or held by one running sequence, that positions
        are in order, and that nobody who waits holds anything."""
        self._memory.check(self._running)
        for s in self._queue.values():
            assert s.state is State.QUEUED, s.describe()
            assert s.slot == s.slab == -1, s.describe()
            assert not s.blocks, s.describe()

    # ------------------------------------------------------------ the turn

    def _on_done(self, done: Done) -> None:
        """Engine callback: the wave in flight ended."""
        if self._closed or self._fatal is not None:
            return
        self._in_flight = False
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
        if not self._in_flight:
            self._advance()
        self._outbox.tell()
        if self._idle_waiters and self.idle:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def _apply(self, done: Done) -> None:
        """Move positions, note tokens, end what is finished, free what the wave held."""
        self._memory.complete(done.wave)
        spoken = self._outbox.spoken
        prompt = sampled = 0
        for sequence, result in zip(self._outgoing.sequences, done.rows, strict=True):
            sequence.in_flight = False
            before = sequence.computed
            sequence.computed = position = result.position
            if before < sequence.prompt_tokens:
                prompt += min(position, sequence.prompt_tokens) - before
            if sequence.mark is not None:
                self._end(sequence)
                continue
            tokens = result.tokens
            if tokens:
                sequence.output_tokens += len(tokens)
                sampled += len(tokens)
                spoken.append((sequence, result))
            if result.bad_logits:
                text = "The model produced logits that no token can be sampled from."
                sequence.mark = (FinishReason.CANCELLED, BadLogits(text))
            elif result.stop or result.latched:
                sequence.mark = (FinishReason.STOP, None)
            elif sequence.output_tokens >= sequence.limit:
                sequence.mark = (sequence.limit_reason, None)
            else:
                if tokens:
                    sequence.aim_decode(tokens[-1])
                continue
            self._end(sequence)
        ms = (done.ended_ns - done.started_ns) / 1e6
        self._cost.observe(self._outgoing.columns, self._outgoing.prompt, ms)
        metrics = self._metrics
        metrics.wave_ms.observe(ms)
        metrics.waves.inc()
        metrics.prompt_tokens.inc(prompt)
        metrics.output_tokens.inc(sampled)
        metrics.blocks_free.value = self._memory.blocks.free

    def _advance(self) -> None:
        """Admit, then submit the next wave if there is anything to compute."""
        outgoing = self._outgoing
        while True:
            if self._admit_due:
                self._admit()
            if not self._running:
                return
            if not outgoing.steady:
                budget = Budget(self._columns, self._cost.chunk)
                outgoing.plan(self._running, budget, one_newcomer=self._careful)
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
                self._in_flight = True
                self._careful = self._careful and not outgoing.steady
            else:
                self._call_turn(RING_FULL_S)
            return

    def _admit(self) -> None:
        self._admit_due = False
        memory = self._memory
        if not self._queue or not self._places_free():
            return
        waiting = [
            Waiting(n, s.job.priority, s.job.side, memory.reserve_for(s), s.overtaken)
            for n, s in self._queue.items()
        ]
        now = self._clock()
        for number in admit(waiting, self._places_free(), memory.blocks.free):
            sequence = self._queue.pop(number)
            for other in self._queue.values():
                if other.number > number:
                    break
                other.overtaken += 1
            memory.give(sequence)
            sequence.state = State.RUNNING
            sequence.fresh = True
            sequence.admitted = now
            self._running.append(sequence)
            self._outgoing.steady = False
        self._gauge()

    # ------------------------------------------------------------ ends

    def _end(self, sequence: Sequence) -> None:
        """Release its memory; its sink hears of it after the next submit. mark is set."""
        if sequence.state is State.QUEUED:
            del self._queue[sequence.number]
        else:
            self._running.remove(sequence)
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
        if len(newcomers) > 1:
            self._careful = True
            return
        blamed = list(newcomers or self._outgoing.sequences)
        _log.error("wave refused", error=error.message, sequences=len(blamed))
        for sequence in blamed:
            self.cancel(sequence, error)

    def _die(self, text: str) -> None:
        """The engine is lost: end everything, refuse everything."""
        self._fatal = text
        _log.error("engine failed", error=text)
        self._abandon(EnginePoisoned(text))
        if self._on_fatal is not None:
            self._on_fatal(text)

    def _abandon(self, error: KslError) -> None:
        """End everything without waiting for the wave in flight, which will never be heard of."""
        self._in_flight = False
        for sequence in self._live():
            if sequence.mark is None:
                sequence.mark = (FinishReason.CANCELLED, error)
            self._end(sequence)
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

    def _places_free(self) -> int:
        memory = self._memory
        free = min(memory.slots.free, memory.slabs.free)
        return min(free, memory.places - len(self._running))

    def _gauge(self) -> None:
        metrics = self._metrics
        metrics.running.value = len(self._running)
        metrics.queued.value = len(self._queue)
        metrics.blocks_free.value = self._memory.blocks.free

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
