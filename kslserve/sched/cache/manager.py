"""PrefixCache: owner of all checkpoints.

A checkpoint is made by a cut inside a prompt row, which copies the state as it passes a position,
or by taking over the slab of a sequence that ends. It is adopted by copying its slab, sharing its
full blocks and copying the partial one, in the `before` list of the adopter's first wave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kslserve.engine.types import EngineInfo, Ids
from kslserve.sched.cache.checkpoint import Checkpoint, Kind
from kslserve.sched.cache.cuts import Cuts
from kslserve.sched.cache.device import DeviceTier
from kslserve.sched.cache.index import Match, Node, RadixIndex
from kslserve.sched.cache.saves import CachePolicy, save_points
from kslserve.sched.cache.tiers import Tiers
from kslserve.sched.cache.value import Score, lasting, value
from kslserve.sched.memory import Memory
from kslserve.sched.sequence import Sequence
from kslserve.sched.snapshot import CacheSnapshot

RECENT_PATHS = 64  # prompts that stay known after their sequence, to find junctions


class PrefixCache:
    """policy: None keeps and finds nothing. last_wave: id of the newest submitted wave. score: what
    decides who goes, lowest first. landing: `complete` has to be called for the wave in flight."""

    def __init__(
        self,
        memory: Memory,
        info: EngineInfo,
        policy: CachePolicy | None,
        last_wave: Callable[[], int],
        score: Score = value,
    ) -> None:
        self.policy = policy or CachePolicy()
        self.enabled = policy is not None
        self.index = RadixIndex()
        self.admissions = 0
        self.hits = self.misses = self.tokens_saved = 0
        self.device = DeviceTier(
            memory, self.index, self._now, last_wave, score, lambda c: self.tiers.evicted(c)
        )
        self.cuts = Cuts(memory, self.index, self.device, last_wave)
        self.tiers = Tiers(
            self.policy,
            info,
            self.index,
            self.device.held,
            self._now,
            self.device.is_tight,
            lambda checkpoint: self.index.detach(checkpoint.node),
        )
        self.landing = False
        self._recent: deque[Node] = deque()

    def _now(self) -> int:
        return self.admissions

    # ------------------------------------------------------------ finding and adopting

    def match(self, ids: Ids) -> Match:
        """What is known of a prompt. Checkpoints that leave nothing to compute are not `found`:
        the last token's output is needed."""
        if not self.enabled:
            return Match(0, [])
        match = self.index.match(ids)
        match.found = [c for c in match.found if c.position < len(ids)]
        return match

    def adopt(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint on the device until the sequence has copied its state."""
        assert checkpoint.device is not None
        checkpoint.pins += 1
        sequence.adopted = checkpoint

    def forget_adoption(self, sequence: Sequence) -> None:
        """It was copied, or never will be."""
        checkpoint, sequence.adopted = sequence.adopted, None
        if checkpoint is not None:
            checkpoint.pins -= 1

    def enter(self, sequence: Sequence, match: Match) -> None:
        """A sequence was admitted: count, choose its save points, make its prompt known."""
        if not self.enabled:
            return
        self.admissions += 1
        self.tiers.dirty = True
        start = sequence.computed
        sequence.path = self.index.insert(sequence.ids)
        self.index.hold(sequence.path)
        sequence.saves = save_points(
            len(sequence.ids),
            start,
            match.known,
            sequence.job.boundaries,
            [c.position for c in match.found],
            self.policy,
        )
        if start:
            self.hits += 1
            self.tokens_saved += start
            for checkpoint in match.found:
                if checkpoint.position == start:
                    checkpoint.hits += 1
                    checkpoint.used = self.admissions
        else:
            self.misses += 1

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """A sequence that holds memory ends. keep: its state is good, make it a checkpoint; that
        takes its slab."""
        self.forget_adoption(sequence)
        if sequence.load is not None:
            self.tiers.unpin(sequence.load.copy)
            sequence.load = None
        path, sequence.path = sequence.path, None
        if path is not None:
            self._recent.append(path)
            if len(self._recent) > RECENT_PATHS:
                self.index.release(self._recent.popleft())
        if not (keep and self.enabled) or sequence.computed < self.policy.min_tokens:
            return
        if sequence.computed == sequence.cached_tokens:
            return
        node = self.index.insert(sequence.computed_ids())
        self.index.hold(node)
        if self.device.keep(node, Kind.GENERATION, sequence.slab, sequence.blocks):
            sequence.kept = sequence.computed
            self._grew()
        sequence.slab = -1

    def clear(self) -> None:
        """Forget everything in memory that is not in use."""
        self.device.clear()
        self.tiers.clear()
        while self._recent:
            self.index.release(self._recent.popleft())

    # ------------------------------------------------------------ growing old

    @property
    def can_age(self) -> bool:
        """There is a disk tier, and something in memory that it could hold."""
        return self.tiers.disk is not None and bool(self.device.held or len(self.tiers.host))

    def age(self) -> bool:
        """Nothing was asked for in a long time: write what is worth a file, a part in each wave,
        and then keep nothing in memory but what could not be written. True while something is on
        its way; it is for the caller to come again."""
        tiers = self.tiers
        tiers.flush()
        tiers.start_save()
        if tiers.busy:
            return True
        tiers.flushing = False
        self.device.clear(self._must_stay)
        tiers.clear(self._must_stay)
        return False

    def _must_stay(self, checkpoint: Checkpoint) -> bool:
        """It is worth a file and has none. What is not costs little to compute, or was passed by
        long ago."""
        long_enough = checkpoint.position >= self.policy.disk_min_tokens
        return checkpoint.disk is None and long_enough and lasting(checkpoint)

    # ------------------------------------------------------------ waves

    def unplan(self) -> None:
        """The planned wave will not be sent: give back the slabs of its cuts."""
        self.cuts.unplan()
        self.tiers.unplan()

    def sent(self) -> None:
        """The planned wave is in flight."""
        self.cuts.sent()
        self.tiers.sent()
        self.landing = bool(self.cuts.flying) or self.tiers.active is not None

    def complete(self) -> bool:
        """The wave in flight completed: its cuts are checkpoints. Called before its sequences give
        up any memory. True if there were any."""
        self.landing = False
        self.tiers.complete()
        landed = bool(self.cuts.flying)
        if self.cuts.complete():
            self._grew()
        return landed

    def abandon(self) -> None:
        """The engine is lost, or its waves will not be heard of."""
        self.cuts.abandon()
        self.tiers.abandon()

    def _grew(self) -> None:
        """There is a new checkpoint on the device."""
        self.tiers.dirty = True
        self.tiers.start_save()

    # ------------------------------------------------------------ looking

    def snapshot(self) -> CacheSnapshot:
        """Counts for health and metrics."""
        device, tiers, disk = self.device, self.tiers, self.tiers.disk
        return CacheSnapshot(
            enabled=self.enabled,
            device=len(device.held),
            host=len(tiers.host),
            host_bytes=tiers.host.used,
            image_bytes=tiers.host.images.held,
            disk=disk.files if disk is not None else 0,
            disk_bytes=disk.used if disk is not None else 0,
            hits=self.hits,
            misses=self.misses,
            builds=device.saves,
            evictions=device.evictions,
            tokens_saved=self.tokens_saved,
            reads=disk.reads if disk is not None else 0,
            writes=disk.writes if disk is not None else 0,
            bad_files=disk.bad_files if disk is not None else 0,
            path_bytes=self.index.path_bytes,
        )

    def held_slabs(self) -> list[int]:
        """Slabs of checkpoints and of cuts on their way."""
        return self.device.slabs() + self.cuts.slabs()

    def held_blocks(self) -> list[list[int]]:
        return self.device.blocks()

    def check(self) -> None:
        """Assert that index and copies agree."""
        self.index.check()
        active = self.tiers.active
        self.tiers.host.check(self.index.checkpoints(), active.known if active is not None else ())
        self.device.check()
