"""Checkpoints in host memory: images of a slab and of blocks, shared where prefixes are.

The owner of the images is this process's memory; the engine only copies between them and its pools,
by SAVE and LOAD ops of waves. Two copies whose paths part behind a block share its image, so that
the growing copies of a conversation cost what is new in them.

What the images take in all is bounded, those on their way to and from the device and files
included: the budget, and WAY_BYTES or one checkpoint, whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.images import Image, ImagePool
from kslserve.sched.cache.index import Node

WAY_BYTES = 512 << 20  # images may take beyond the budget while they move


class HostBlock:
    """The image of one block. copies: host copies that contain it, and one in the making."""

    __slots__ = ("copies", "data")

    def __init__(self, data: Image) -> None:
        self.data = data
        self.copies = 0


class HostCopy:
    """A checkpoint's images. pins: readers that still need it. new: images that this copy was the
    first to need."""

    __slots__ = ("blocks", "pins", "slab")

    def __init__(self, slab: Image, blocks: list[HostBlock]) -> None:
        self.slab = slab
        self.blocks = blocks
        self.pins = 0


class HostTier:
    """budget: bytes that copies without pins may take. used: bytes of all copies. coming: bytes of
    images that are copied or read, to become copies."""

    __slots__ = ("_copies", "block_tokens", "budget", "coming", "images", "used")

    def __init__(self, budget: int, block_tokens: int) -> None:
        self.budget = budget
        self.block_tokens = block_tokens
        self.used = self.coming = 0
        self.images = ImagePool(most=budget + WAY_BYTES)
        self._copies: dict[Checkpoint, HostCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def has_way(self, nbytes: int) -> bool:
        """Whether images of this size may be made now. What is larger than the bound comes when
        nothing else does."""
        if self.used + self.coming + nbytes <= self.budget + WAY_BYTES:
            return True
        return not self.coming and self.used <= self.budget

    def add(self, checkpoint: Checkpoint, copy: HostCopy) -> None:
        assert checkpoint.host is None
        checkpoint.host = copy
        self._copies[checkpoint] = copy
        self.used += copy.slab.nbytes
        self.hold(copy.blocks)

    def remove(self, checkpoint: Checkpoint) -> None:
        copy = self._copies.pop(checkpoint)
        checkpoint.host = None
        self.used -= copy.slab.nbytes
        self.release(copy.blocks)

    def hold(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            if not block.copies:
                self.used += block.data.nbytes
            block.copies += 1

    def release(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            block.copies -= 1
            if not block.copies:
                self.used -= block.data.nbytes

    def loose(self) -> list[Checkpoint]:
        """Those that can be removed."""
        return [checkpoint for checkpoint, copy in self._copies.items() if not copy.pins]

    def shared(self, node: Node) -> list[HostBlock]:
        """Images of the first full blocks of a path, as far as any copy has them."""
        at: Node | None = node
        while at is not None and at.end >= self.block_tokens:
            other = _any_copy(at)
            if other is not None:
                return other.blocks[: at.end // self.block_tokens]
            at = at.parent
        return []

    def check(self, checkpoints: Iterable[Checkpoint], held: Iterable[HostBlock]) -> None:
        """Assert that counts and bytes are those of the copies, and of the one in the making, which
        holds these blocks."""
        assert {c for c in checkpoints if c.host is not None} == set(self._copies)
        counts: dict[int, int] = {}
        blocks = {}
        for block in chain(held, *(copy.blocks for copy in self._copies.values())):
            counts[id(block)] = counts.get(id(block), 0) + 1
            blocks[id(block)] = block
        assert all(blocks[i].copies == n for i, n in counts.items())
        slabs = sum(copy.slab.nbytes for copy in self._copies.values())
        assert self.used == slabs + sum(b.data.nbytes for b in blocks.values())


def _any_copy(node: Node) -> HostCopy | None:
    """A host copy at this node or below, whose path therefore begins with this one."""
    stack = [node]
    while stack:
        at = stack.pop()
        if at.checkpoint is not None and at.checkpoint.host is not None:
            return at.checkpoint.host
        stack.extend(child for child in at.children.values() if child.total)
    return None
