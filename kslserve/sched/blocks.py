"""BlockPool: who owns which KV block.

Owner of the free list and the reference counts; the engine owns the bytes. A block that nobody
references any more is retired under the id of the last wave that may touch it and becomes free when
that wave is complete, so a block is never given out while a wave in flight may still write it.

References of the prefix cache are counted apart: a block that only the cache holds is `evictable`,
memory that can be had back at any time.
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

    def complete(self, wave: int) -> Sequence[int]:
        """Mark every wave up to `wave` complete and return what that frees."""
        if wave > self.completed:
            self.completed = wave
        if not self._waiting:
            return ()
        freed = [i for w, indices in self._waiting if w <= wave for i in indices]
        self._waiting = [entry for entry in self._waiting if entry[0] > wave]
        return freed

    def indices(self) -> list[int]:
        return [i for _, indices in self._waiting for i in indices]


def ranges(indices: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of every run of neighbours, ascending."""
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and sum(found[-1]) == index:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((index, 1))
    return found


class BlockPool:
    """`count` blocks of `block_tokens` positions. All ids are 0..count-1. retired: blocks that wait
    for a wave. evictable: blocks that only the cache references. touched: blocks whose pages the
    engine may hold."""

    __slots__ = (
        "_cached", "_free", "_references", "_retired", "block_tokens", "count", "evictable",
        "retired", "touched",
    )  # fmt: skip

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self.evictable = 0
        self.retired = 0
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._cached = [0] * count
        self._retired = Retired()
        self.touched: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that can be allocated now; retired ones are not among them."""
        return len(self._free)

    @property
    def reclaimable(self) -> int:
        """Blocks that are free, will be, or can be made so by emptying the cache."""
        return len(self._free) + self.retired + self.evictable

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
        self.touched.update(taken)
        return taken

    def idle(self) -> set[int]:
        """Free blocks with pages."""
        return self.touched.intersection(self._free)

    def bare(self, n: int) -> list[int]:
        """Of the `n` free blocks that are given out next, those without pages; next ones first."""
        return [block for block in self._free[: -n - 1 : -1] if block not in self.touched]

    def share(self, blocks: Iterable[int], *, cache: bool = False) -> None:
        """One more reference to each, the cache's or a sequence's; ValueError for a block that
        nobody holds."""
        references, cached = self._references, self._cached
        for block in blocks:
            held = references[block]
            if held < 1:
                raise ValueError(f"block {block} is not held")
            references[block] = held + 1
            if cache:
                cached[block] += 1
            elif held == cached[block]:
                self.evictable -= 1

    def release(self, blocks: Iterable[int], wave: int, *, cache: bool = False) -> None:
        """Drop one reference to each, of the kind it was taken with; `wave` is the last wave that
        may touch them (0: none). ValueError for a block that is not held so."""
        references, cached = self._references, self._cached
        dropped = []
        for block in blocks:
            left = references[block] - 1
            if left < 0 or (not cached[block] if cache else left < cached[block]):
                raise ValueError(f"block {block} is not held")
            references[block] = left
            if cache:
                cached[block] -= 1
                if not left:
                    self.evictable -= 1
            elif left and left == cached[block]:
                self.evictable += 1
            if not left:
                dropped.append(block)
        freed = self._retired.add(dropped, wave)
        self._free.extend(freed)
        self.retired += len(dropped) - len(freed)

    def only_cached(self, blocks: Iterable[int]) -> int:
        """How many of these blocks only the cache holds."""
        references, cached = self._references, self._cached
        return sum(references[block] == cached[block] for block in blocks)

    def exclusive(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have one holder."""
        references = self._references
        return sum(references[block] == 1 for block in blocks)

    def complete(self, wave: int) -> None:
        """Every wave up to `wave` is complete."""
        freed = self._retired.complete(wave)
        if freed:
            self.retired -= len(freed)
            self._free.extend(freed)

    def check(self, held: Iterable[Sequence[int]], cached: Iterable[Sequence[int]] = ()) -> None:
        """Assert that free, retired and held blocks are all blocks, once each; `held` and `cached`
        are the block lists of all holders, whose multiplicities are the reference counts."""
        counts, by_cache = [0] * self.count, [0] * self.count
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        for blocks in cached:
            for block in blocks:
                counts[block] += 1
                by_cache[block] += 1
        assert counts == self._references, "block references differ from the holders"
        assert by_cache == self._cached, "cached references differ from the checkpoints"
        only = sum(1 for n, c in zip(counts, by_cache, strict=True) if n and n == c)
        assert only == self.evictable, f"{self.evictable} blocks count as evictable, not {only}"
        idle = self._free + self._retired.indices()
        assert len(idle) == len(set(idle)), "a block is free twice"
        assert len(idle) == len(self._free) + self.retired, "retired blocks are miscounted"
        assert not any(counts[block] for block in idle), "a free block is held"
        assert len(idle) + sum(1 for n in counts if n) == self.count, "a block is lost"
