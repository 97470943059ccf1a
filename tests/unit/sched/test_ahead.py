"""What the next prompt will write is touched before it comes, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kslserve.engine.fake import FakeEngine
from kslserve.engine.types import OpKind, StateOp
from kslserve.sched.ahead import PIECE, SLABS, Ahead
from kslserve.sched.job import Job
from kslserve.sched.memory import Memory
from tests.world import SIZES, World, alone, job

ROOMY = replace(SIZES, slabs=20)
MIB = 1 << 20


def made(most: int, slab_bytes: int = MIB, block_bytes: int = MIB) -> tuple[Memory, Ahead]:
    """Blocks have as many bytes of codes as of rows."""
    codes = block_bytes // 2 // ROOMY.block_tokens
    info = replace(
        FakeEngine(ROOMY).info,
        slab_bytes=slab_bytes, block_bytes=block_bytes // 2, kv_code_bytes=codes,
    )  # fmt: skip
    memory = Memory(info, ROOMY.slots, 256)
    return memory, Ahead(memory, info, most)


def pieces(ahead: Ahead) -> list[tuple[list[int], list[int]]]:
    """All that are left."""
    found = []
    while any(piece := ahead.next()):
        ahead.touched(*piece)
        found.append(piece)
    return found


def test_what_is_given_out_next_comes_in_pieces() -> None:
    memory, ahead = made(10 * MIB)
    assert pieces(ahead) == [
        ([0, 1], []), ([2, 3], []), ([], [0, 1]), ([], [2, 3]), ([], [4, 5]),
    ]  # fmt: skip
    assert SLABS == 4
    assert PIECE == 2 * MIB
    assert memory.blocks.allocate(4) == [3, 2, 1, 0]
    assert [memory.slabs.take() for _ in range(2)] == [0, 1]
    assert pieces(ahead) == [([4, 5], []), ([], [6, 7]), ([], [8, 9])]
    memory.blocks.release([3, 2, 1, 0], 0)
    assert pieces(ahead) == [], "those are used first, and have pages"


@pytest.mark.parametrize(
    ("most", "slab_bytes", "block_bytes", "wanted"),
    [
        (0, MIB, MIB, []),
        (MIB - 1, MIB, MIB, []),
        (3 * MIB, 4 * MIB, 4 * MIB, []),
        (7 * MIB, 16 * MIB, 3 * MIB, [(0, 1), (0, 1)]),
        (9 * MIB, 8 * MIB, 64, [(1, 0), (0, 40)]),
        (1 << 40, 1 << 10, 1 << 30, [(4, 0), *[(0, 1)] * 40]),
    ],
)
def test_a_number_of_bytes(
    most: int, slab_bytes: int, block_bytes: int, wanted: list[tuple[int, int]]
) -> None:
    """At most `most` of them; more than a piece at once only where one slab or block has more."""
    _, ahead = made(most, slab_bytes, block_bytes)
    assert [(len(slabs), len(blocks)) for slabs, blocks in pieces(ahead)] == wanted


def test_ops_name_runs_of_neighbours() -> None:
    _, ahead = made(MIB)
    assert ahead.ops([2, 0, 1], []) == [StateOp(OpKind.TOUCH_SLABS, 0, 3)]
    assert ahead.ops([], [7, 3, 4]) == [
        StateOp(OpKind.TOUCH_BLOCKS, 3, 2), StateOp(OpKind.TOUCH_BLOCKS, 7, 1)
    ]  # fmt: skip


def test_only_after_work_and_once() -> None:
    world = World(ROOMY, limits={"ahead_bytes": 1 << 20, "idle_return_s": 10.0})
    state, progress = world.engine.state, world.engine.progress
    world.run(until=1.0)
    assert state.touched == 0
    got = world.submit(job(40, 5))
    world.run(until=5.0)
    assert got.ids == alone(job(40, 5)).ids
    assert state.touched == SLABS - 1 + ROOMY.blocks - 3, "it left a slab and three blocks behind"
    before = progress().submitted
    world.submit(job(20, 5, seed=1))
    waves = alone_waves(job(20, 5, seed=1))
    world.run(until=9.0)
    assert progress().submitted == before + waves, "all of it was ready"
    world.run(until=100.0)
    assert state.dropped == SLABS + ROOMY.blocks, "in the end it goes back like the rest"
    assert progress().submitted == before + waves + 1
    world.check_all_free()


def alone_waves(new: Job) -> int:
    world = World(ROOMY)
    world.submit(new)
    world.run()
    return world.engine.progress().submitted


def test_a_refusal_ends_it_until_more_was_done() -> None:
    world = World(ROOMY, limits={"ahead_bytes": 1 << 20})
    world.submit(job(5, 1))
    world.faults.refuse.add(2)
    world.run()
    assert (world.engine.state.touched, world.fatal) == (0, [])
    assert not world.scheduler._memory.blocks.bare(1), "what was used"
    world.submit(job(5, 1))
    world.run()
    assert world.engine.state.touched == SLABS - 1 + ROOMY.blocks - 1
    world.check_all_free()


def test_who_comes_meanwhile_waits_for_one_wave() -> None:
    world = World(ROOMY, limits={"ahead_bytes": 1 << 20})
    world.submit(job(40, 5))
    while not world.engine.state.touched:
        assert world.clock.step()
    got = world.submit(job(40, 5, seed=2))
    world.run()
    assert got.ids == alone(job(40, 5, seed=2)).ids
    world.check_all_free()
