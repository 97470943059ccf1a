"""Cuts: checkpoints in the making. A wave copies a row's state as it passes a position; when the
wave completes, the copy is a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.engine.types import CUTS_MAX, OpKind, StateOp
from kslserve.sched.cache.checkpoint import Checkpoint, Kind
from kslserve.sched.cache.device import DeviceTier
from kslserve.sched.cache.index import Node, RadixIndex
from kslserve.sched.cache.saves import RANK
from kslserve.sched.memory import Memory
from kslserve.sched.sequence import Sequence


class Cut:
    """A copy in a wave that was not sent yet, or is in flight. It holds its node."""

    __slots__ = ("kind", "node", "sequence", "slab")

    def __init__(self, sequence: Sequence, node: Node, kind: Kind, slab: int) -> None:
        self.sequence = sequence
        self.node = node
        self.kind = kind
        self.slab = slab


class Cuts:
    """last_wave: id of the newest submitted wave. flying: those in flight."""

    def __init__(
        self,
        memory: Memory,
        index: RadixIndex,
        device: DeviceTier,
        last_wave: Callable[[], int],
    ) -> None:
        self.flying: list[Cut] = []
        self._planned: list[Cut] = []
        self._memory = memory
        self._index = index
        self._device = device
        self._last_wave = last_wave

    def plan(self, sequence: Sequence, n: int) -> tuple[tuple[int, int], ...]:
        """The cuts of its next row of n positions, as (offset, slab)."""
        saves, start = sequence.saves, sequence.computed
        if not saves:
            return ()
        due = [p for p in saves if start < p.position <= start + n]
        if len(due) > CUTS_MAX:
            due = sorted(sorted(due, key=lambda p: RANK[p.kind])[:CUTS_MAX])
        cuts = []
        for point in due:
            node = self._index.insert(sequence.ids[: point.position])
            self._index.hold(node)
            slab = None
            if node.checkpoint is None or node.checkpoint.device is None:
                slab = self._device.slab_for(node, point.kind)
            if slab is None:
                self._index.release(node)
            else:
                self._planned.append(Cut(sequence, node, point.kind, slab))
                cuts.append((point.position - start, slab))
        return tuple(cuts)

    def copy_of(self, sequence: Sequence, checkpoint: Checkpoint) -> list[StateOp]:
        """The op that brings a checkpoint back to the device from the memory of a sequence that
        was just loaded from its host copy; none where there is no slab for it."""
        if checkpoint.device is not None:
            return []
        slab = self._device.slab_for(checkpoint.node, checkpoint.kind)
        if slab is None:
            return []
        self._index.hold(checkpoint.node)
        self._planned.append(Cut(sequence, checkpoint.node, checkpoint.kind, slab))
        return [StateOp(OpKind.COPY_SLAB, sequence.slab, slab)]

    def unplan(self) -> None:
        """The planned wave will not be sent."""
        self._drop(self._planned, 0)

    def sent(self) -> None:
        """The planned wave is in flight."""
        self.flying += self._planned
        self._planned.clear()

    def complete(self) -> bool:
        """The wave in flight completed: its cuts are checkpoints. True if any is new."""
        flying, self.flying = self.flying, []
        new = False
        for cut in flying:
            blocks = cut.sequence.blocks
            if len(blocks) < self._memory.blocks.blocks_for(cut.node.end):
                self._drop([cut], self._last_wave())  # it ended without a row in this wave
            elif self._device.keep(cut.node, cut.kind, cut.slab, blocks):
                cut.sequence.kept = max(cut.sequence.kept, cut.node.end)
                new = True
        return new

    def abandon(self) -> None:
        """Waves will not be heard of any more."""
        self._drop(self._planned, 0)
        self._drop(self.flying, self._last_wave())

    def slabs(self) -> list[int]:
        return [cut.slab for cut in (*self._planned, *self.flying)]

    def _drop(self, cuts: list[Cut], wave: int) -> None:
        for cut in cuts:
            self._memory.slabs.release(cut.slab, wave)
            self._index.release(cut.node)
        cuts.clear()
