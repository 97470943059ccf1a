"""PrefixCache: owner of all checkpoints.

A checkpoint is made by a cut inside a prompt row, which copies the state as it passes a position,
or by taking over the slab of a sequence that ends. It is adopted by copying its slab, sharing its
full blocks and copying the partial one, in the `before` list of the adopter's first wave.
Checkpoints are memory lent out: whenever a sequence needs a slab or a block, the one worth least
goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kslserve.engine.types import CUTS_MAX, EngineInfo, Ids, OpKind, StateOp
from kslserve.sched.cache.checkpoint import Checkpoint, DeviceCopy, Kind
from kslserve.sched.cache.index import Match, Node, RadixIndex
from kslserve.sched.cache.saves import RANK, CachePolicy, save_points
from kslserve.sched.cache.tiers import Tiers
from kslserve.sched.cache.value import Score, saved, value
from kslserve.sched.limits import CacheSnapshot
from kslserve.sched.memory import Memory
from kslserve.sched.sequence import Sequence

PRESSURE = 8  # one part in so many is left
RECENT_PATHS = 64  # prompts that stay known after their sequence, to find junctions


class Planned:
    """A cut of a wave that was not sent yet, or is in flight."""

    __slots__ = ("kind", "node", "sequence", "slab")

    def __init__(self, sequence: Sequence, node: Node, kind: Kind, slab: int) -> None:
        self.sequence = sequence
        self.node = node
        self.kind = kind
        self.slab = slab


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
        self.hits = self.misses = self.saves = self.evictions = self.tokens_saved = 0
        self._memory = memory
        self._last_wave = last_wave
        self.score = score
        self._block_tokens = info.block_tokens
        self._on_device: dict[Checkpoint, None] = {}  # in order of making
        self.tiers = Tiers(
            self.policy,
            info,
            self.index,
            self._on_device,
            lambda: self.admissions,
            self._is_tight,
            lambda checkpoint: self.index.detach(checkpoint.node),
        )
        self._planned: list[Planned] = []
        self.flying: list[Planned] = []
        self.landing = False
        self._recent: deque[Node] = deque()
        memory.lender = self

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

    # ------------------------------------------------------------ making

    def cuts(self, sequence: Sequence, n: int) -> tuple[tuple[int, int], ...]:
        """The cuts of its next row of n positions, with slabs for them."""
        saves, start = sequence.saves, sequence.computed
        if not saves:
            return ()
        due = [p for p in saves if start < p.position <= start + n]
        if len(due) > CUTS_MAX:
            due = sorted(sorted(due, key=lambda p: RANK[p.kind])[:CUTS_MAX])
        cuts = []
        for point in due:
            node = self._node(sequence.ids[: point.position])
            slab = None
            if node.checkpoint is None or node.checkpoint.device is None:
                slab = self._slab_for(node, point.kind)
            if slab is None:
                self.index.release(node)
            else:
                self._planned.append(Planned(sequence, node, point.kind, slab))
                cuts.append((point.position - start, slab))
        return tuple(cuts)

    def copy_of(self, sequence: Sequence, checkpoint: Checkpoint) -> list[StateOp]:
        """The op that brings a checkpoint back to the device from the memory of a sequence that
        was just loaded from its host copy; none where there is no slab for it."""
        if checkpoint.device is not None:
            return []
        slab = self._slab_for(checkpoint.node, checkpoint.kind)
        if slab is None:
            return []
        self.index.hold(checkpoint.node)
        self._planned.append(Planned(sequence, checkpoint.node, checkpoint.kind, slab))
        return [StateOp(OpKind.COPY_SLAB, sequence.slab, slab)]

    def unplan(self) -> None:
        """The planned wave will not be sent: give back the slabs of its cuts."""
        self._drop(self._planned, 0)
        self.tiers.unplan()

    def abandon(self) -> None:
        """The engine is lost, or its waves will not be heard of."""
        self._drop(self._planned, 0)
        self._drop(self.flying, self._last_wave())
        self.tiers.abandon()

    def sent(self) -> None:
        """The planned wave is in flight."""
        self.flying += self._planned
        self._planned.clear()
        self.tiers.sent()
        self.landing = bool(self.flying) or self.tiers.active is not None

    def complete(self) -> bool:
        """The wave in flight completed: its cuts are checkpoints. Called before its sequences give
        up any memory. True if there were any."""
        self.landing = False
        self.tiers.complete()
        flying, self.flying = self.flying, []
        for planned in flying:
            blocks = planned.sequence.blocks
            if len(blocks) * self._block_tokens < planned.node.end:
                self._drop([planned], self._last_wave())  # it ended without a row in this wave
                continue
            self._keep(planned.node, planned.kind, planned.slab, blocks)
        return bool(flying)

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
        node = self._node(sequence.computed_ids())
        self._keep(node, Kind.GENERATION, sequence.slab, sequence.blocks)
        sequence.slab = -1

    def _drop(self, planned: list[Planned], wave: int) -> None:
        for cut in planned:
            self._memory.slabs.release(cut.slab, wave)
            self.index.release(cut.node)
        planned.clear()

    def _keep(self, node: Node, kind: Kind, slab: int, blocks: list[int]) -> None:
        """Make a checkpoint at a held node, which lets go of it, or give the slab back where there
        is one already. blocks: of its positions and maybe of more."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            checkpoint = Checkpoint(node, kind, self.admissions)
            self.index.attach(node, checkpoint)
        checkpoint.used = self.admissions
        if checkpoint.device is None:
            blocks = blocks[: self._memory.blocks.blocks_for(node.end)]
            self._memory.blocks.share(blocks, cache=True)
            checkpoint.device = DeviceCopy(slab, blocks)
            self._on_device[checkpoint] = None
            self.saves += 1
            self.tiers.dirty = True
            self.tiers.start_save()
        else:
            self._memory.slabs.release(slab, self._last_wave())
        self.index.release(node)

    def _node(self, ids: Ids) -> Node:
        """The node of these tokens, held."""
        node = self.index.insert(ids)
        self.index.hold(node)
        return node

    def _slab_for(self, node: Node, kind: Kind) -> int | None:
        """A slab for a new checkpoint: a free one, or that of one which is worth less."""
        slabs = self._memory.slabs
        if not slabs.free:
            victim = self._least()
            if victim is None:
                return None
            new = Checkpoint(node, kind, self.admissions)
            if self.score(victim, self.admissions) >= self.score(new, self.admissions):
                return None
            self.evict(victim)
        return slabs.take() if slabs.free else None

    # ------------------------------------------------------------ giving back

    @property
    def lent_slabs(self) -> int:
        """Slabs that can be had back now."""
        return sum(not c.pins for c in self._on_device)

    def free_slab(self) -> bool:
        """See memory.Lender."""
        slabs = self._memory.slabs
        while not slabs.free + slabs.retired:
            victim = self._least()
            if victim is None:
                return False
            self.evict(victim)
        return slabs.free > 0

    def free_blocks(self, n: int) -> bool:
        """See memory.Lender."""
        pool = self._memory.blocks
        while pool.free + pool.retired < n:
            victim = self._least_by_blocks()
            if victim is None:
                return False
            self.evict(victim)
        return pool.free >= n

    def evict(self, checkpoint: Checkpoint) -> None:
        """Give up its copy on the device."""
        device = checkpoint.device
        assert device is not None
        assert not checkpoint.pins
        self.tiers.evicted(checkpoint)
        wave = self._last_wave()
        self._memory.slabs.release(device.slab, wave)
        self._memory.blocks.release(device.blocks, wave, cache=True)
        checkpoint.device = None
        del self._on_device[checkpoint]
        self.evictions += 1
        if not checkpoint.stored:
            self.index.detach(checkpoint.node)

    def clear(self) -> None:
        """Forget everything in memory that is not in use."""
        for checkpoint in [c for c in self._on_device if not c.pins]:
            self.evict(checkpoint)
        self.tiers.clear()
        while self._recent:
            self.index.release(self._recent.popleft())

    def _is_tight(self) -> bool:
        """Something on the device will have to go soon."""
        slabs, blocks = self._memory.slabs, self._memory.blocks
        few = max(1, slabs.count // PRESSURE), max(1, blocks.count // PRESSURE)
        return slabs.free <= few[0] or blocks.free <= few[1]

    def _least(self) -> Checkpoint | None:
        """The checkpoint that is worth least."""
        loose = [c for c in self._on_device if not c.pins]
        return min(loose, key=lambda c: self.score(c, self.admissions), default=None)

    def _least_by_blocks(self) -> Checkpoint | None:
        """The one worth least for the blocks that it alone holds."""
        pool = self._memory.blocks
        loose = [c for c in self._on_device if not c.pins]
        loose.sort(key=lambda c: self.score(c, self.admissions) / self._own_blocks(c))
        for checkpoint in loose:
            assert checkpoint.device is not None
            # Of most, a running sequence or a neighbour holds all blocks: those free nothing.
            if pool.exclusive(checkpoint.device.blocks):
                return checkpoint
        return loose[0] if loose else None

    def _own_blocks(self, checkpoint: Checkpoint) -> float:
        """About how many blocks would be free without it."""
        node = checkpoint.node
        if node.below:
            return 0.5
        return 0.5 + saved(node) / self._block_tokens

    # ------------------------------------------------------------ looking

    def snapshot(self) -> CacheSnapshot:
        """Counts for health and metrics."""
        tiers = self.tiers
        return CacheSnapshot(
            enabled=self.enabled,
            device=len(self._on_device),
            host=len(tiers.host),
            host_bytes=tiers.host.used,
            disk=tiers.files,
            disk_bytes=tiers.disk.used if tiers.disk is not None else 0,
            hits=self.hits,
            misses=self.misses,
            builds=self.saves,
            evictions=self.evictions,
            tokens_saved=self.tokens_saved,
            reads=tiers.reads,
            writes=tiers.writes,
            bad_files=tiers.bad_files,
        )

    def held_slabs(self) -> list[int]:
        """Slabs of checkpoints and of cuts on their way."""
        slabs = [c.device.slab for c in self._on_device if c.device is not None]
        return slabs + [p.slab for p in (*self._planned, *self.flying)]

    def held_blocks(self) -> list[list[int]]:
        return [c.device.blocks for c in self._on_device if c.device is not None]

    def check(self) -> None:
        """Assert that index and copies agree."""
        self.index.check()
        self.tiers.host.check(self.index.checkpoints())
        indexed = set(self.index.checkpoints())
        assert set(self._on_device) <= indexed
        for checkpoint in indexed:
            assert checkpoint.stored, "a checkpoint without a copy"
            assert (checkpoint.device is not None) == (checkpoint in self._on_device)
            if checkpoint.device is not None:
                needed = self._memory.blocks.blocks_for(checkpoint.position)
                assert len(checkpoint.device.blocks) == needed
