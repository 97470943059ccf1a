"""Memory: the slots, slabs and blocks of an engine, and which sequence holds them.

Blocks of a sequence's whole prompt and output are promised at admission, so nothing can run out of
memory half way, but given out as its positions reach them: until then they serve the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from kslserve.engine.types import EngineInfo
from kslserve.sched.blocks import BlockPool
from kslserve.sched.sequence import Sequence, State
from kslserve.sched.slabs import IndexPool


class Lender(Protocol):
    """Holds memory that it gives back on demand."""

    def free_blocks(self, n: int) -> bool:
        """Make the pool's free blocks n or more; False when it could not (yet)."""

    def free_slab(self) -> bool:
        """The same for one slab."""


class Memory:
    """All pools of an open engine. places: sequences that may hold memory at once. reserved: blocks
    that are promised to sequences and not given out yet. lender: the cache."""

    __slots__ = ("blocks", "lender", "places", "reserved", "slabs", "slots", "window")

    def __init__(self, info: EngineInfo, max_seqs: int, context: int) -> None:
        self.places = min(max_seqs, info.slots, info.slabs)
        self.blocks = BlockPool(info.blocks, info.block_tokens)
        self.slots = IndexPool(info.slots, "slot")
        self.slabs = IndexPool(info.slabs, "slab")
        self.reserved = 0
        self.lender: Lender | None = None
        # The longest timeline that can be held at all.
        self.window = min(context, min(info.blocks, info.blocks_per_slot) * info.block_tokens)

    @property
    def available(self) -> int:
        """Blocks that can still be promised."""
        return self.blocks.reclaimable - self.reserved

    def total_for(self, sequence: Sequence) -> int:
        """Blocks of its whole prompt and output."""
        return self.blocks.blocks_for(sequence.prompt_tokens + sequence.limit)

    def take_slab(self) -> int | None:
        """A slab, from the cache if need be; None when there is none (now)."""
        if not self.slabs.free and not (self.lender is not None and self.lender.free_slab()):
            return None
        return self.slabs.take()

    def take_blocks(self, n: int) -> list[int] | None:
        """n blocks, or None as above."""
        free = self.blocks.free
        if free < n and not (self.lender is not None and self.lender.free_blocks(n)):
            return None
        return self.blocks.allocate(n)

    def give(self, sequence: Sequence, slab: int) -> None:
        """Make it the holder of a slot and of this slab, and promise it what its positions need
        beyond the blocks that it holds. The caller knows that all this is there."""
        sequence.slot = sequence.row.slot = self.slots.take()
        sequence.slab = sequence.row.slab = slab
        sequence.reserved = self.total_for(sequence) - len(sequence.blocks)
        sequence.room = len(sequence.blocks) * self.blocks.block_tokens
        self.reserved += sequence.reserved

    def extend(self, sequence: Sequence, positions: int) -> int:
        """Give it blocks for `positions` positions, as many as there are now; how many of them it
        has then. It cannot fail for long: blocks that were promised are free, will be when a wave
        completes, or are the cache's."""
        pool = self.blocks
        if positions <= sequence.room:
            return positions
        missing = pool.blocks_for(positions) - len(sequence.blocks)
        assert missing <= sequence.reserved, sequence.describe()
        blocks = self.take_blocks(missing)
        if blocks is None:
            missing = pool.free
            blocks = pool.allocate(missing)
        sequence.blocks += blocks
        sequence.reserved -= missing
        self.reserved -= missing
        sequence.room = len(sequence.blocks) * pool.block_tokens
        return min(positions, sequence.room)

    def take_back(self, sequence: Sequence) -> None:
        """Release what it holds; free for others when its last wave is complete. A slab of -1 went
        to the cache."""
        self.slots.release(sequence.slot, sequence.last_wave)
        if sequence.slab >= 0:
            self.slabs.release(sequence.slab, sequence.last_wave)
        self.blocks.release(sequence.blocks, sequence.last_wave)
        self.reserved -= sequence.reserved
        sequence.slot = sequence.slab = -1
        sequence.blocks = []
        sequence.reserved = sequence.tabled = sequence.room = 0

    def complete(self, wave: int) -> None:
        """Every wave up to `wave` is complete."""
        self.slots.complete(wave)
        self.slabs.complete(wave)
        self.blocks.complete(wave)

    def check(
        self,
        running: Iterable[Sequence],
        cached_slabs: Iterable[int] = (),
        cached_blocks: Iterable[Items[int]] = (),
    ) -> None:
        """Assert that everything is free, retired, cached or held by exactly one of `running` (full
        blocks may be held by many), that all promises can be kept, and that positions are in order
        and inside the held blocks."""
        running = list(running)
        self.slots.check(s.slot for s in running)
        self.slabs.check([*(s.slab for s in running), *cached_slabs])
        self.blocks.check([s.blocks for s in running], cached_blocks)
        assert self.reserved == sum(s.reserved for s in running), "promises are miscounted"
        assert self.available >= 0, "more blocks are promised than there are"
        size = self.blocks.block_tokens
        writers: set[int] = set()
        for s in running:
            assert s.state is State.RUNNING, s.describe()
            assert 0 <= s.computed <= s.known <= self.window, s.describe()
            assert s.computed <= len(s.blocks) * size == s.room, s.describe()
            assert len(s.blocks) + s.reserved == self.total_for(s), s.describe()
            for block in s.blocks[s.computed // size :]:
                assert block not in writers, f"block {block} has two writers"
                writers.add(block)
        for s in running:
            for block in s.blocks[: s.computed // size]:
                assert block not in writers, f"block {block} is finished and written"
