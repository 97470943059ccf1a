"""Memory: the slots, slabs and blocks of an engine, and which sequence holds them."""

from __future__ import annotations

from collections.abc import Iterable

from kslserve.engine.types import EngineInfo
from kslserve.sched.blocks import BlockPool
from kslserve.sched.sequence import Sequence, State
from kslserve.sched.slabs import IndexPool


class Memory:
    """All pools of an open engine. places: sequences that may hold memory at once."""

    __slots__ = ("blocks", "places", "slabs", "slots", "window")

    def __init__(self, info: EngineInfo, max_seqs: int, context: int) -> None:
        self.places = min(max_seqs, info.slots, info.slabs)
        self.blocks = BlockPool(info.blocks, info.block_tokens)
        self.slots = IndexPool(info.slots, "slot")
        self.slabs = IndexPool(info.slabs, "slab")
        # The longest timeline that can be held at all.
        self.window = min(context, min(info.blocks, info.blocks_per_slot) * info.block_tokens)

    def reserve_for(self, sequence: Sequence) -> int:
        """Blocks of its whole prompt and output."""
        return self.blocks.blocks_for(sequence.prompt_tokens + sequence.limit)

    def give(self, sequence: Sequence) -> None:
        """Make it the holder of a slot, a slab and all its blocks; the caller knows that they are
        free."""
        sequence.slot = sequence.row.slot = self.slots.take()
        sequence.slab = sequence.row.slab = self.slabs.take()
        sequence.blocks = self.blocks.allocate(self.reserve_for(sequence))

    def take_back(self, sequence: Sequence) -> None:
        """Release what it holds; free for others when its last wave is complete."""
        self.slots.release(sequence.slot, sequence.last_wave)
        self.slabs.release(sequence.slab, sequence.last_wave)
        self.blocks.release(sequence.blocks, sequence.last_wave)
        sequence.slot = sequence.slab = -1
        sequence.blocks = []

    def complete(self, wave: int) -> None:
        """Every wave up to `wave` is complete."""
        self.slots.complete(wave)
        self.slabs.complete(wave)
        self.blocks.complete(wave)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that everything is free, retired or held by exactly one of `running`, and that
        positions are in order and inside the held blocks."""
        running = list(running)
        self.slots.check(s.slot for s in running)
        self.slabs.check(s.slab for s in running)
        self.blocks.check([s.blocks for s in running])
        for s in running:
            assert s.state is State.RUNNING, s.describe()
            assert 0 <= s.computed <= s.known <= self.window, s.describe()
            assert s.known <= len(s.blocks) * self.blocks.block_tokens, s.describe()
