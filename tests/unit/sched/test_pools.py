"""Block and index pools: conservation, reference counts, retirement."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kslserve.sched.blocks import BlockPool
from kslserve.sched.slabs import IndexPool


def test_blocks_return_when_their_wave_completes() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first, wave=3)
    assert pool.free == 0
    pool.complete(2)
    assert pool.free == 0
    pool.complete(3)
    assert pool.free == 2
    pool.release(second, wave=3)  # that wave is complete already
    assert pool.free == 4
    pool.check([])


def test_shared_blocks_need_every_holder_to_let_go() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.check([blocks, blocks])
    pool.release(blocks, wave=0)
    assert pool.free == 1
    pool.release(blocks, wave=0)
    assert pool.free == 3


def test_misuse_of_blocks_is_refused() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="3 blocks"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="not held"):
        pool.release([0], wave=0)
    with pytest.raises(ValueError, match="not held"):
        pool.share([1])
    pool.check([])


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_index_pool() -> None:
    pool = IndexPool(2, "slot")
    a, b = pool.take(), pool.take()
    assert {a, b} == {0, 1}
    with pytest.raises(ValueError, match="no slot is free"):
        pool.take()
    pool.release(a, wave=1)
    pool.check([b])
    assert pool.free == 0
    with pytest.raises(ValueError, match="not held"):
        pool.release(a, wave=1)
    pool.complete(1)
    assert pool.take() == a
    with pytest.raises(AssertionError):
        pool.check([b])


class Pools(RuleBasedStateMachine):
    """Holders come, share and go while waves complete in order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockPool(12, 16)
        self.slots = IndexPool(5, "slot")
        self.held: list[list[int]] = []
        self.taken: list[int] = []
        self.wave = 0
        self.completed = 0
        self.busy: dict[int, int] = {}  # block -> last wave that may touch it

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        if n <= self.blocks.free:
            blocks = self.blocks.allocate(n)
            assert all(self.busy.get(b, 0) <= self.completed for b in blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.blocks.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        wave = data.draw(st.integers(0, self.wave))
        for block in blocks:
            if not any(block in others for others in self.held):
                self.busy[block] = wave
        self.blocks.release(blocks, wave)

    @rule()
    def take(self) -> None:
        if self.slots.free:
            self.taken.append(self.slots.take())

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        self.slots.release(self.taken.pop(), self.wave)

    @rule()
    def submit(self) -> None:
        self.wave += 1

    @precondition(lambda self: self.completed < self.wave)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        self.blocks.complete(self.completed)
        self.slots.complete(self.completed)

    @invariant()
    def conserved(self) -> None:
        self.blocks.check(self.held)
        self.slots.check(self.taken)

    def teardown(self) -> None:
        for blocks in self.held:
            self.blocks.release(blocks, self.wave)
        self.blocks.complete(self.wave)
        assert self.blocks.free == 12


Pools.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPools = Pools.TestCase


def test_what_only_the_cache_holds_is_evictable() -> None:
    pool = BlockPool(6, 16)
    blocks = pool.allocate(4)
    pool.share(blocks[:3], cache=True)
    assert (pool.evictable, pool.only_cached(blocks), pool.exclusive(blocks)) == (0, 0, 1)
    pool.release(blocks, 0)
    assert (pool.free, pool.evictable, pool.reclaimable) == (3, 3, 6)
    assert pool.exclusive(blocks[:3]) == 3
    pool.share(blocks[:2])  # adopted
    assert (pool.evictable, pool.only_cached(blocks[:3])) == (1, 1)
    pool.share(blocks[:1], cache=True)
    pool.release(blocks[:3], 0, cache=True)
    assert (pool.free, pool.evictable) == (4, 0)
    pool.check([blocks[:2]], [blocks[:1]])
    pool.release(blocks[:2], 7)
    assert (pool.free, pool.retired, pool.evictable) == (4, 1, 1)
    pool.complete(7)
    pool.release(blocks[:1], 0, cache=True)
    assert (pool.free, pool.retired, pool.evictable) == (6, 0, 0)
    pool.check([])


def test_references_are_given_back_as_what_they_were_taken() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not held"):
        pool.release([block], 0, cache=True)
    pool.share([block], cache=True)
    pool.release([block], 0)
    with pytest.raises(ValueError, match="not held"):
        pool.release([block], 0)
    pool.release([block], 0, cache=True)
    assert pool.free == 2
