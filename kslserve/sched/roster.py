"""Roster: who is queued, who runs, and how one becomes the other.

A sequence is queued, admitted, perhaps preempted and admitted again, and ends. Each step moves its
place and its memory, and leaves word for its sink in the outbox."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.core.usage import FinishReason
from kslserve.errors import BadLogits, KslError, RequestExpired
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.deadlines import Deadlines
from kslserve.sched.entrance import Entrance
from kslserve.sched.fanout import Outbox
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.memory import Memory
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.sequence import Sequence, State


class Roster:
    """queue: by number, in order of arrival. running: in order of admission. guided: running
    sequences with a guide. due: something changed that may let a queued sequence in. wake: asks for
    a turn soon."""

    def __init__(
        self,
        memory: Memory,
        cache: PrefixCache,
        outgoing: Outgoing,
        deadlines: Deadlines,
        metrics: SchedMetrics,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.queue: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.guided = 0
        self.due = False
        self.entrance = Entrance(memory, cache, self.queue, self.running, clock)
        self.outbox = Outbox(metrics.ends, self.cancel)
        self._memory = memory
        self._cache = cache
        self._outgoing = outgoing
        self._deadlines = deadlines
        self._metrics = metrics
        self._clock = clock
        self._wake = wake

    @property
    def live(self) -> list[Sequence]:
        return [*self.queue.values(), *self.running]

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence waits for its place."""
        self.queue[sequence.number] = sequence
        self._deadlines.watch((sequence,), sequence.arrived)
        self.due = True
        self._wake()

    def admit(self) -> None:
        """Let in whoever fits, in order, and where one of higher priority does not fit, have others
        give way."""
        self.due = False
        now = self._clock()
        while True:
            sequence = self.entrance.next()
            if sequence is None:
                victim = self.entrance.victim()
                if victim is None:
                    break
                self._preempt(victim)
                continue
            sequence.state = State.RUNNING
            sequence.fresh = True
            sequence.admitted = now
            self.running.append(sequence)
            if self._outgoing.speculator is not None:
                self._outgoing.speculator.enter(sequence)
            self.guided += sequence.job.guide is not None
            self._outgoing.steady = False

    def _preempt(self, sequence: Sequence) -> None:
        """Checkpoint, release, queue again at its old place."""
        self.running.remove(sequence)
        self.guided -= sequence.job.guide is not None
        self._cache.leave(sequence, keep=True)
        self._memory.take_back(sequence)
        sequence.start_over(self._clock())
        self.queue[sequence.number] = sequence
        by_number = sorted(self.queue.items())
        self.queue.clear()
        self.queue.update(by_number)
        self._deadlines.watch((sequence,), sequence.queued)
        self._outgoing.steady = False
        self._metrics.events["preemption"].inc()

    def cancel(self, sequence: Sequence, error: KslError | None = None) -> None:
        """End a sequence: now, or when its wave completes; later tokens are dropped. The reason is
        CANCELLED. Ending a sequence twice does nothing."""
        if sequence.state is State.ENDED or sequence.mark is not None:
            return
        sequence.mark = (FinishReason.CANCELLED, error)
        self._outgoing.steady = False
        if not sequence.in_flight:
            self.end(sequence)
            self._wake()

    def end(self, sequence: Sequence, keep: bool = True) -> None:
        """Release its memory; its sink hears of it after the next submit. mark is set. keep: its
        state may become a checkpoint."""
        if sequence.state is State.QUEUED:
            del self.queue[sequence.number]
            self.entrance.forget(sequence)
        else:
            self.running.remove(sequence)
            self.guided -= sequence.job.guide is not None
            self._cache.leave(sequence, keep=keep and _is_good(sequence))
            self._memory.take_back(sequence)
        sequence.state = State.ENDED
        self.outbox.ended.append(sequence)
        self._outgoing.steady = False
        self.due = True

    def abandon(self, error: KslError) -> None:
        """End everything without waiting for the wave in flight, which will never be heard of."""
        self._cache.abandon()
        for sequence in self.live:
            if sequence.mark is None:
                sequence.mark = (FinishReason.CANCELLED, error)
            self.end(sequence, keep=False)
        self._memory.complete(self._outgoing.id)
        self._deadlines.stop()

    def expire(self) -> None:
        """End what is too old and wait for the next deadline."""
        now = self._clock()
        self._deadlines.stop()
        for sequence in self.live:
            error = self._deadlines.error(sequence, now)
            if error is not None:
                expired = isinstance(error, RequestExpired)
                self._metrics.events["request_timeout" if expired else "queue_timeout"].inc()
                self.cancel(sequence, error)
        self._deadlines.watch((s for s in self.live if s.mark is None), now)

    def check(self) -> None:
        """Assert that all memory is free, retired, cached or held by one running sequence, that
        positions are in order, and that nobody who waits holds anything."""
        cache = self._cache
        self._memory.check(self.running, cache.held_slabs(), cache.held_blocks())
        cache.check()
        for s in self.queue.values():
            assert s.state is State.QUEUED, s.describe()
            assert s.slot == s.slab == -1, s.describe()
            assert not s.blocks, s.describe()


def _is_good(sequence: Sequence) -> bool:
    """Whether its state is what its tokens make it."""
    if sequence.fresh:
        return False
    assert sequence.mark is not None
    return not isinstance(sequence.mark[1], BadLogits)
