"""Pages that are taken before they are needed.

An engine in the machine's own memory takes pages as slabs and blocks are first written, and the
system clears each of them: in a virtual machine whose host must find the page first, that costs a
prompt of a small model a twentieth of its time. So when nothing runs any more, the engine is told
to touch what the next prompt will write, little by little, since whoever comes waits for the piece
at hand. Only after work, and no more than a fixed number of bytes: a server that nobody uses stays
small."""

from __future__ import annotations

from kslserve.engine.types import EngineInfo, OpKind, StateOp
from kslserve.sched.blocks import ranges
from kslserve.sched.memory import Memory

PIECE = 2 << 20  # bytes of a wave, if no slab or block is larger
SLABS = 4  # a turn makes about as many checkpoints


class Ahead:
    """most: bytes to have ready, 0 for none."""

    __slots__ = ("_block_bytes", "_memory", "_most", "_slab_bytes")

    def __init__(self, memory: Memory, info: EngineInfo, most: int) -> None:
        self._memory = memory
        self._most = most
        self._slab_bytes = max(1, info.slab_bytes)
        self._block_bytes = max(1, info.block_bytes + info.block_tokens * info.kv_code_bytes)

    def next(self) -> tuple[list[int], list[int]]:
        """Slabs and blocks of the next piece; both empty when all is ready."""
        slabs, blocks = self._memory.slabs, self._memory.blocks
        n = min(SLABS, self._most // self._slab_bytes)
        bare = slabs.bare(n)[: max(1, PIECE // self._slab_bytes)]
        if bare:
            return bare, []
        n_blocks = (self._most - n * self._slab_bytes) // self._block_bytes
        return [], blocks.bare(n_blocks)[: max(1, PIECE // self._block_bytes)]

    def ops(self, slabs: list[int], blocks: list[int]) -> list[StateOp]:
        """What touches them."""
        ops = [StateOp(OpKind.TOUCH_SLABS, *part) for part in ranges(slabs)]
        return ops + [StateOp(OpKind.TOUCH_BLOCKS, *part) for part in ranges(blocks)]

    def touched(self, slabs: list[int], blocks: list[int]) -> None:
        """The engine took those ops."""
        self._memory.slabs.touched.update(slabs)
        self._memory.blocks.touched.update(blocks)
