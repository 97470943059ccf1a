"""Copies between device and host, a bounded part of which rides in each wave.

What a wave carries is planned, and counts only once the engine took the wave: a refused one is
planned again."""

from __future__ import annotations

from collections.abc import Sequence

from kslserve.engine.types import OpKind, StateOp
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.hosttier import HostBlock, HostCopy
from kslserve.sched.cache.images import Image

Item = tuple[OpKind, int, int, Image]  # kind, index, where the image begins in what it is of
PART_MIN = 1024


class Transfer:
    """The ops between a checkpoint's place on the device and a host copy. known: blocks that
    the host has already. nbytes: of all others and the slab."""

    __slots__ = ("_items", "_planned", "_sent", "checkpoint", "copy", "known", "nbytes")

    def __init__(
        self,
        checkpoint: Checkpoint,
        copy: HostCopy,
        items: list[Item],
        known: Sequence[HostBlock] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.copy = copy
        self.known = known
        self.nbytes = sum(image.nbytes for _, _, _, image in items)
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
            kind, index, offset, image = self._items[self._sent + self._planned]
            ops.append(StateOp(kind, index, offset, image))
            self._planned += 1
            room -= image.nbytes
        return ops

    def unplan(self) -> None:
        self._planned = 0

    def sent(self) -> None:
        self._sent += self._planned
        self._planned = 0


def parts(kind: OpKind, slab: int, image: Image, most: int) -> list[Item]:
    """A slab in parts of about `most` bytes, since one may be more than a wave should carry."""
    size = max(most, PART_MIN)
    return [(kind, slab, at, image[at : at + size]) for at in range(0, image.nbytes, size)]


def save(
    checkpoint: Checkpoint, slab: Image, known: list[HostBlock], images: list[Image], most: int
) -> Transfer:
    """Device to host. known: images of its first blocks that the host has; images: room for the
    other ones. most: bytes of an op."""
    device = checkpoint.device
    assert device is not None
    blocks = known + [HostBlock(image) for image in images]
    items = parts(OpKind.SAVE_SLAB, device.slab, slab, most)
    for block, image in zip(device.blocks[len(known) :], images, strict=True):
        items.append((OpKind.SAVE_BLOCK, block, 0, image))
    return Transfer(checkpoint, HostCopy(slab, blocks), items, known)


def load(
    checkpoint: Checkpoint, copy: HostCopy, slab: int, blocks: list[int], first: int, most: int
) -> Transfer:
    """Host to the memory of a sequence, which has the blocks before `first` already. most: bytes of
    an op."""
    items = parts(OpKind.LOAD_SLAB, slab, copy.slab, most)
    for block, image in zip(blocks[first:], copy.blocks[first:], strict=False):
        items.append((OpKind.LOAD_BLOCK, block, 0, image.data))
    return Transfer(checkpoint, copy, items)
