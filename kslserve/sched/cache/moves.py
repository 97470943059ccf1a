"""Copies between device and host, a bounded part of which rides in each wave.

What a wave carries is planned, and counts only once the engine took the wave: a refused one is
planned again."""

from __future__ import annotations

from kslserve.engine.types import OpKind, StateOp
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.hosttier import HostBlock, HostCopy, Image

Item = tuple[OpKind, int, Image]


class Transfer:
    """The ops between a checkpoint's place on the device and a host copy."""

    __slots__ = ("_items", "_planned", "_sent", "checkpoint", "copy")

    def __init__(self, checkpoint: Checkpoint, copy: HostCopy, items: list[Item]) -> None:
        self.checkpoint = checkpoint
        self.copy = copy
        self._items = items
        self._sent = self._planned = 0

    @property
    def ready(self) -> bool:
        """Some ops are not in any wave."""
        return self._sent + self._planned < len(self._items)

    @property
    def all_sent(self) -> bool:
        return self._sent == len(self._items)

    @property
    def planned(self) -> bool:
        return self._planned > 0

    def take(self, room: int) -> list[StateOp]:
        """The next ops, of about `room` bytes and one at least."""
        ops: list[StateOp] = []
        while self.ready and (room > 0 or not ops):
            kind, index, image = self._items[self._sent + self._planned]
            ops.append(StateOp(kind, index, data=image))
            self._planned += 1
            room -= image.nbytes
        return ops

    def unplan(self) -> None:
        self._planned = 0

    def sent(self) -> None:
        self._sent += self._planned
        self._planned = 0


def save(
    checkpoint: Checkpoint, slab: Image, known: list[HostBlock], images: list[Image]
) -> Transfer:
    """Device to host. known: images of its first blocks that the host has; images: room for the
    other ones."""
    device = checkpoint.device
    assert device is not None
    blocks = known + [HostBlock(image) for image in images]
    items: list[Item] = [(OpKind.SAVE_SLAB, device.slab, slab)]
    for block, image in zip(device.blocks[len(known) :], images, strict=True):
        items.append((OpKind.SAVE_BLOCK, block, image))
    return Transfer(checkpoint, HostCopy(slab, blocks), items)


def load(
    checkpoint: Checkpoint, copy: HostCopy, slab: int, blocks: list[int], first: int
) -> Transfer:
    """Host to the memory of a sequence, which has the blocks before `first` already."""
    items: list[Item] = [(OpKind.LOAD_SLAB, slab, copy.slab)]
    for block, image in zip(blocks[first:], copy.blocks[first:], strict=False):
        items.append((OpKind.LOAD_BLOCK, block, image.data))
    return Transfer(checkpoint, copy, items)
