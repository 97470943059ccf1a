"""BlockPool: who owns which KV block.

Owner of the free list and the reference counts; the engine owns the bytes. A block that nobody
references any more is retired under the id of the last wave that may touch it and becomes free when
that wave is complete, so a block is never given out while a wave in flight may still write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Retired:
    """Indices waiting for a wave to complete. Shared by all pools."""

    __slots__ = ("_waiting", "completed")

    def __init__(self) -> None:
        self.completed = 0  # id of the newest completed wave
        self._waiting: list[tuple[int, Sequence[int]]] = []

    def add(self, indices: Sequence[int], wave: int) -> Sequence[int]:
        """Indices that are free at once: all of them when `wave` is complete already, else none."""
        if wave <= self.completed:
            return indices
        if indices:
            self._waiting.append((wave, indices))
        return ()

    def complete(self, wave: int) -> list[int]:
        """Mark every wave up to `wave` complete and return what that frees."""
        self.completed = max(self.completed, wave)
        if not self._waiting:
            return []
        freed = [i for w, indices in self._waiting if w <= wave for i in indices]
        self._waiting = [entry for entry in self._waiting if entry[0] > wave]
        return freed

    def indices(self) -> list[int]:
        return [i for _, indices in self._waiting for i in indices]


class BlockPool:
    """`count` blocks of `block_tokens` positions. All ids are 0..count-1."""

    __slots__ = ("_free", "_references", "_retired", "block_tokens", "count")

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._retired = Retired()

    @property
    def free(self) -> int:
        """Blocks that can be allocated now; retired ones are not among them."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def allocate(self, n: int) -> list[int]:
        """n blocks with one reference each. The caller has checked `free`; ValueError otherwise."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} blocks asked for, {len(self._free)} free")
        taken = self._free[len(self._free) - n :]
        del self._free[len(self._free) - n :]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; ValueError for a block that nobody holds."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._references[block] += 1

    def release(self, blocks: Iterable[int], wave: int) -> None:
        """Drop one reference to each; `wave` is the last wave that may touch them (0: none).
        ValueError for a block that is not held."""
        dropped = []
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if not self._references[block]:
                dropped.append(block)
        self._free.extend(self._retired.add(dropped, wave))

    def complete(self, wave: int) -> None:
        """Every wave up to `wave` is complete."""
        self._free.extend(self._retired.complete(wave))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that free, retired and held blocks are all blocks, once each; `held` are the block
        lists of all holders, whose multiplicities are the reference counts."""
        counts = [0] * self.count
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "block references differ from the holders"
        idle = self._free + self._retired.indices()
        assert len(idle) == len(set(idle)), "a block is free twice"
        assert not any(counts[block] for block in idle), "a free block is held"
        assert len(idle) + sum(1 for n in counts if n) == self.count, "a block is lost"
