"""Entrance: how a queued sequence becomes a running one, from a checkpoint where there is one.

It may wait first, for a checkpoint that a running prompt is about to leave (donors.py), or for one
that is read from disk.

A sequence of lower priority gives way where one of higher priority has no place: its state becomes
a checkpoint, it is queued again, and goes on from there later."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.sched.admit import OVERTAKES_MAX, Verdict, Waiting, choose, order
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.index import Match
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.cache.moves import load
from kslserve.sched.donors import Waiter, find_donor
from kslserve.sched.memory import Memory
from kslserve.sched.sequence import Sequence

PREEMPTIONS_MAX = 2  # times that one sequence gives way
SHORT_TOKENS = 256  # uncovered positions of what may pass one that does not fit


class Entrance:
    """queue and running are the scheduler's own, read here."""

    def __init__(
        self,
        memory: Memory,
        cache: PrefixCache,
        queue: dict[int, Sequence],
        running: list[Sequence],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._queue = queue
        self._running = running
        self._clock = clock
        self._waiters: dict[int, Waiter] = {}
        self.waiting = False  # somebody waits for a donor

    def places_free(self) -> int:
        """Sequences that can be given a slot and a slab now."""
        memory = self._memory
        slabs = memory.slabs.free + self._cache.device.lent_slabs
        return min(memory.slots.free, slabs, memory.places - len(self._running))

    def next(self) -> Sequence | None:
        """The next sequence that enters, holding its memory and taken off the queue, or None."""
        self.waiting = False
        if not self._queue or self.places_free() < 1:
            return None
        entries = [
            Waiting(n, s.job.priority, s.job.side, s.overtaken) for n, s in self._queue.items()
        ]
        chosen = choose(
            entries,
            lambda w: self._judge(self._queue[w.number]),
            lambda w: self._is_short(self._queue[w.number]),
        )
        if chosen is None:
            return None
        sequence = self._queue.pop(chosen.number)
        for other in self._queue.values():
            if other.number > sequence.number:
                break
            if not self._waits(other):
                other.overtaken += 1
        return sequence

    def victim(self) -> Sequence | None:
        """A running sequence that should give way to the first one in the queue, which comes before
        it by priority and would fit if all such sequences gave way; or None."""
        head = self._head()
        if head is None or not self._cache.enabled:
            return None
        lower = [
            s
            for s in self._running
            if s.job.priority > head.job.priority
            and s.preempted < PREEMPTIONS_MAX
            and s.overtaken < OVERTAKES_MAX
            and s.mark is None
            and not (s.fresh or s.in_flight)
        ]
        memory = self._memory
        gain = sum(len(s.blocks) + s.reserved for s in lower)
        if not lower or memory.total_for(head) > memory.available + gain:
            return None
        return max(lower, key=lambda s: (s.job.priority, s.admitted, s.number))

    def _head(self) -> Sequence | None:
        """Who is first in order of those that do not wait by their own will."""
        entries = [
            Waiting(n, s.job.priority, s.job.side, s.overtaken)
            for n, s in self._queue.items()
            if not self._waits(s)
        ]
        return self._queue[order(entries)[0].number] if entries else None

    def forget(self, sequence: Sequence) -> None:
        """It is no longer queued."""
        waiter = self._waiters.pop(sequence.number, None)
        if waiter is not None:
            self._cache.tiers.forget(waiter)

    # ------------------------------------------------------------ one sequence

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether a checkpoint leaves little of its prompt to compute, as of the last look."""
        waiter = self._waiters.setdefault(sequence.number, Waiter())
        if waiter.match is None:
            waiter.match = self._cache.match(sequence.ids)
            waiter.version = self._cache.index.version
        found = waiter.match.found
        if not found or sequence.job.score:
            return False
        return len(sequence.ids) - found[-1].position <= SHORT_TOKENS

    def _judge(self, sequence: Sequence) -> Verdict:
        waiter = self._waiters.setdefault(sequence.number, Waiter())
        index = self._cache.index
        if waiter.match is None or waiter.version != index.version:
            waiter.match = self._cache.match(sequence.ids)
            waiter.version = index.version
        match = waiter.match
        # The logits of positions that a checkpoint has are gone.
        score = sequence.job.score
        source = None if score else self._source(match)
        if not score and self._should_wait(sequence, waiter, source):
            return Verdict.WAITS
        if source is not None and source.device is None and source.host is None:
            source = self._source(match, in_memory=True)
        if not self._give(sequence, match, source):
            return Verdict.FULL
        if not sequence.told:
            sequence.cached_tokens = sequence.computed
        self._cache.enter(sequence, match)
        self.forget(sequence)
        return Verdict.FITS

    def _source(self, match: Match, in_memory: bool = False) -> Checkpoint | None:
        """The checkpoint to start from: the deepest one, but not one that is farther away for a few
        positions more."""
        found = [c for c in match.found if not in_memory or c.device or c.host]
        if not found:
            return None
        near = next((c for c in reversed(found) if c.device is not None), None)
        if near is not None and found[-1].position - near.position < self._cache.policy.gap:
            return near
        return found[-1]

    def _give(self, sequence: Sequence, match: Match, source: Checkpoint | None) -> bool:
        """Give it memory, if all it needs can be had."""
        memory = self._memory
        sequence.computed = 0
        if source is not None:
            shared = self._shared_blocks(match, source)
            needed = memory.total_for(sequence) - len(shared) + memory.blocks.only_cached(shared)
            if needed > memory.available:
                return False
            if self._start_from(sequence, source, shared):
                return True
            # Memory is so short that only what it would start from could give it.
        if memory.total_for(sequence) > memory.available:
            return False
        slab = memory.take_slab()
        if slab is None:
            return False
        memory.give(sequence, slab)
        return True

    def _shared_blocks(self, match: Match, source: Checkpoint) -> list[int]:
        """Full blocks on the device that hold the first positions of a prompt."""
        for checkpoint in reversed(match.found):
            if checkpoint.device is not None and checkpoint.position <= source.position:
                full = checkpoint.position // self._memory.blocks.block_tokens
                return checkpoint.device.blocks[:full]
        return []

    def _start_from(self, sequence: Sequence, source: Checkpoint, shared: list[int]) -> bool:
        memory, cache = self._memory, self._cache
        memory.blocks.share(shared)
        sequence.blocks = list(shared)
        if source.device is not None:
            cache.adopt(sequence, source)
        sequence.computed = source.position
        host = source.host
        if self._settle(sequence):
            if source.device is None:
                assert host is not None
                host.pins += 1
                first = len(shared)
                sequence.load = load(
                    source, host, sequence.slab, sequence.blocks, first,
                    self._cache.policy.part_bytes,
                )  # fmt: skip
            return True
        cache.forget_adoption(sequence)
        memory.blocks.release(sequence.blocks, 0)
        sequence.blocks = []
        sequence.computed = 0
        return False

    def _settle(self, sequence: Sequence) -> bool:
        """A slab, and blocks for the positions that it starts with."""
        memory = self._memory
        slab = memory.take_slab()
        if slab is None:
            return False
        memory.give(sequence, slab)
        if memory.extend(sequence, sequence.computed) == sequence.computed:
            return True
        memory.take_back(sequence)
        return False

    # ------------------------------------------------------------ waiting

    def _waits(self, sequence: Sequence) -> bool:
        waiter = self._waiters.get(sequence.number)
        return waiter is not None and waiter.since is not None

    def _should_wait(self, sequence: Sequence, waiter: Waiter, source: Checkpoint | None) -> bool:
        """Whether to wait for the checkpoint of a running prompt, which is asked to make one, or
        for one to be read from disk."""
        cache = self._cache
        now = self._clock()
        until = (now if waiter.since is None else waiter.since) + cache.policy.donor_wait_s
        if not cache.enabled or sequence.overtaken >= OVERTAKES_MAX or now >= until:
            return False
        start = source.position if source is not None else 0
        donor = find_donor(sequence, waiter, start, self._running, cache.policy)
        if donor is not None:
            waiter.donors.add(donor.number)
        elif source is not None and source.device is None and source.host is None:
            cache.tiers.read(source, waiter)
        else:
            waiter.since = None
            return False
        if waiter.since is None:
            waiter.since = now
        self.waiting = True
        return True
