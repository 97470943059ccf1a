"""Checkpoints on the device: slabs and blocks that are lent out. Whenever a sequence, or a better
checkpoint, needs one, the one worth least goes."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.sched.cache.checkpoint import Checkpoint, DeviceCopy, Kind
from kslserve.sched.cache.index import Node, RadixIndex
from kslserve.sched.cache.value import Score, saved
from kslserve.sched.memory import Memory

PRESSURE = 8  # one part in so many is left


class DeviceTier:
    """now: the count of admissions. last_wave: id of the newest submitted wave. score: what decides
    who goes, lowest first. on_evict: called before a checkpoint's memory is released. A
    memory.Lender.

    held: in order of making. saves, evictions: counts."""

    def __init__(
        self,
        memory: Memory,
        index: RadixIndex,
        now: Callable[[], int],
        last_wave: Callable[[], int],
        score: Score,
        on_evict: Callable[[Checkpoint], None],
    ) -> None:
        self.held: dict[Checkpoint, None] = {}
        self.saves = self.evictions = 0
        self.score = score
        self._memory = memory
        self._index = index
        self._now = now
        self._last_wave = last_wave
        self._on_evict = on_evict
        memory.lender = self

    def keep(self, node: Node, kind: Kind, slab: int, blocks: list[int]) -> bool:
        """Make a checkpoint at a held node, which lets go of it, or give the slab back where there
        is one already. blocks: of its positions and maybe of more. True if it is new."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            checkpoint = Checkpoint(node, kind, self._now())
            self._index.attach(node, checkpoint)
        checkpoint.used = self._now()
        new = checkpoint.device is None
        if new:
            blocks = blocks[: self._memory.blocks.blocks_for(node.end)]
            self._memory.blocks.share(blocks, cache=True)
            checkpoint.device = DeviceCopy(slab, blocks)
            self.held[checkpoint] = None
            self.saves += 1
        else:
            self._memory.slabs.release(slab, self._last_wave())
        self._index.release(node)
        return new

    def slab_for(self, node: Node, kind: Kind) -> int | None:
        """A slab for a new checkpoint: a free one, or that of one which is worth less."""
        slabs = self._memory.slabs
        if not slabs.free:
            victim = self._least()
            if victim is None:
                return None
            new = Checkpoint(node, kind, self._now())
            if self.score(victim, self._now()) >= self.score(new, self._now()):
                return None
            self.evict(victim)
        return slabs.take() if slabs.free else None

    # ------------------------------------------------------------ giving back

    @property
    def lent_slabs(self) -> int:
        """Slabs that can be had back now."""
        return sum(not c.pins for c in self.held)

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
        self._on_evict(checkpoint)
        wave = self._last_wave()
        self._memory.slabs.release(device.slab, wave)
        self._memory.blocks.release(device.blocks, wave, cache=True)
        checkpoint.device = None
        del self.held[checkpoint]
        self.evictions += 1
        if not checkpoint.stored:
            self._index.detach(checkpoint.node)

    def clear(self, stays: Callable[[Checkpoint], bool] = lambda checkpoint: False) -> None:
        """Evict what is not in use, but for what `stays`."""
        for checkpoint in [c for c in self.held if not (c.pins or stays(c))]:
            self.evict(checkpoint)

    def is_tight(self) -> bool:
        """Something here will have to go soon."""
        slabs, blocks = self._memory.slabs, self._memory.blocks
        few = max(1, slabs.count // PRESSURE), max(1, blocks.count // PRESSURE)
        return slabs.free <= few[0] or blocks.free <= few[1]

    def _least(self) -> Checkpoint | None:
        """The checkpoint that is worth least."""
        loose = [c for c in self.held if not c.pins]
        return min(loose, key=lambda c: self.score(c, self._now()), default=None)

    def _least_by_blocks(self) -> Checkpoint | None:
        """The one worth least for the blocks that it alone holds."""
        pool = self._memory.blocks
        loose = [c for c in self.held if not c.pins]
        loose.sort(key=lambda c: self.score(c, self._now()) / self._own_blocks(c))
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
        return 0.5 + saved(node) / self._memory.blocks.block_tokens

    # ------------------------------------------------------------ looking

    def slabs(self) -> list[int]:
        return [c.device.slab for c in self.held if c.device is not None]

    def blocks(self) -> list[list[int]]:
        return [c.device.blocks for c in self.held if c.device is not None]

    def check(self) -> None:
        """Assert that the index and the copies agree."""
        indexed = set(self._index.checkpoints())
        assert set(self.held) <= indexed
        for checkpoint in indexed:
            assert checkpoint.stored, "a checkpoint without a copy"
            assert (checkpoint.device is not None) == (checkpoint in self.held)
            if checkpoint.device is not None:
                needed = self._memory.blocks.blocks_for(checkpoint.position)
                assert len(checkpoint.device.blocks) == needed
