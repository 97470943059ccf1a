"""IndexPool: fixed engine indices with one holder each, for slots and slabs.

Same rule as blocks: an index that is released returns to the free list when the last wave that may
touch it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable

from kslserve.sched.blocks import Retired


class IndexPool:
    """Indices 0..count-1. `noun` names one in messages. touched: those whose pages the engine may
    hold."""

    __slots__ = ("_free", "_held", "_retired", "count", "noun", "touched")

    def __init__(self, count: int, noun: str) -> None:
        self.count = count
        self.noun = noun
        self._free = list(range(count - 1, -1, -1))
        self._held = [False] * count
        self._retired = Retired()
        self.touched: set[int] = set()

    @property
    def free(self) -> int:
        """Indices that can be taken now; retired ones are not among them."""
        return len(self._free)

    @property
    def retired(self) -> int:
        """Indices that wait for a wave."""
        return len(self._retired.indices())

    def take(self) -> int:
        """A free index. The caller has checked `free`; ValueError otherwise."""
        if not self._free:
            raise ValueError(f"no {self.noun} is free")
        index = self._free.pop()
        self._held[index] = True
        self.touched.add(index)
        return index

    def idle(self) -> set[int]:
        """Free indices with pages."""
        return self.touched.intersection(self._free)

    def bare(self, n: int) -> list[int]:
        """Of the `n` free indices that are taken next, those without pages; next ones first."""
        return [index for index in self._free[: -n - 1 : -1] if index not in self.touched]

    def release(self, index: int, wave: int) -> None:
        """Give back; `wave` is the last wave that may touch it (0: none). ValueError when nobody
        holds it."""
        if not self._held[index]:
            raise ValueError(f"{self.noun} {index} is not held")
        self._held[index] = False
        self._free.extend(self._retired.add((index,), wave))

    def complete(self, wave: int) -> None:
        """Every wave up to `wave` is complete."""
        freed = self._retired.complete(wave)
        if freed:
            self._free.extend(freed)

    def check(self, held: Iterable[int]) -> None:
        """Assert that free, retired and held indices are all indices, once each."""
        held = list(held)
        every = self._free + self._retired.indices() + held
        assert sorted(every) == list(range(self.count)), f"a {self.noun} is lost or held twice"
        assert all(self._held[i] for i in held), f"a {self.noun} is held and free"
