"""The prefix cache as a caller of the scheduler sees it: what is computed, and what is not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve import log
from kslserve.core.usage import FinishReason
from kslserve.engine.types import OpKind, Wave
from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.diskstore import DiskStore, StateSizes
from kslserve.sched.cache.disktier import Disk
from kslserve.sched.cache.images import ImagePool
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job
from tests.world import SIZES, MemoryStore, Recorder, VirtualDisk, World, alone, job

POLICY = CachePolicy(min_tokens=4, gap=4, interval=1000, disk_min_tokens=4)
ROOMY = replace(SIZES, slots=8, slabs=30, blocks=200)


def world(policy: CachePolicy = POLICY, sizes: Any = ROOMY, **options: Any) -> World:
    limits = {"cache": policy, **options.pop("limits", {})}
    return World(sizes, limits=limits, **options)


def text(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, n, dtype=np.int32)


def ask(ids: np.ndarray, new: int = 3, **changes: Any) -> Job:
    return replace(job(1, new), prompt_ids=ids, **changes)


def then(*parts: Any) -> np.ndarray:
    return np.concatenate([np.array(part, np.int32) for part in parts])


def computed(w: World) -> int:
    return w.scheduler.snapshot().prompt_tokens


def test_a_conversation_computes_what_is_new() -> None:
    w = world()
    first = text(60, 1)
    one = w.submit(ask(first, 5, boundaries=(20, 55)))
    w.run()
    assert (one.cached_tokens, computed(w)) == (0, 60)
    # All but the last token of the answer, which was sampled and never computed.
    second = then(first, one.ids, text(10, 2))
    two = w.submit(ask(second, boundaries=(20, 70)))
    w.run()
    assert two.cached_tokens == 64
    assert computed(w) == 60 + 11
    assert two.ids == alone(ask(second)).ids
    # The same again, a new conversation with the same system prompt, an edit of the last message.
    for ids, cached in ((second, 74), (then(first[:20], text(30, 3)), 20), (first, 59)):
        got = w.submit(ask(ids))
        w.run()
        assert got.cached_tokens == cached
        assert got.ids == alone(ask(ids)).ids
    snapshot = w.scheduler.snapshot().cache
    assert (snapshot.hits, snapshot.misses) == (4, 1)
    assert snapshot.tokens_saved == 64 + 74 + 20 + 59
    w.check_all_free()


def test_cuts_cost_no_pass_of_their_own() -> None:
    w = world(limits={"wave_columns": 64})
    w.submit(ask(text(64, 1), 1, boundaries=(10, 20, 30, 60)))
    w.run()
    assert w.scheduler.snapshot().waves == 1
    assert w.scheduler.snapshot().cache.device == 5  # the end of the generation too


def test_what_fans_out_is_computed_once() -> None:
    w = world()
    shared = text(150, 1)
    jobs = [ask(then(shared, text(10, seed))) for seed in range(6)]
    got = [w.submit(j) for j in jobs]
    w.run()
    assert [r.cached_tokens for r in got] == [0, 150, 150, 150, 150, 150]
    assert computed(w) == 150 + 6 * 10
    for j, r in zip(jobs, got, strict=True):
        assert r.ids == alone(j).ids
    w.check_all_free()


def test_waiting_for_a_donor_is_bounded() -> None:
    w = world(replace(POLICY, donor_wait_s=0.02), options={"wave_s": 0.02})
    shared = text(200, 1)
    first = w.submit(ask(then(shared, [1])))
    second = w.submit(ask(then(shared, [2])))
    w.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert second.ids == alone(ask(then(shared, [2]))).ids


def test_a_donor_that_is_cancelled_leaves_what_it_has() -> None:
    w = world()
    shared = text(200, 1)
    first = w.submit(ask(then(shared, [1])))
    second = w.submit(ask(then(shared, [2])))
    w.run(until=0.06)
    assert second.admitted_count == 0
    w.cancel(first)
    w.run()
    assert first.reason is FinishReason.CANCELLED
    assert 0 < second.cached_tokens < 200
    assert computed(w) == 201
    assert second.ids == alone(ask(then(shared, [2]))).ids


def test_promised_blocks_serve_the_cache_until_they_are_needed() -> None:
    """Requests that may fill the whole pool leave checkpoints alone as long as they do not."""
    w = world(sizes=replace(SIZES, slabs=12, blocks=16))
    first = text(60, 1)
    w.submit(ask(first, 4))
    w.run()
    big = w.submit(ask(text(20, 2), 200, stop_ids=tuple(range(0, 512, 16))))
    w.run()
    assert big.reason is FinishReason.STOP
    again = w.submit(ask(then(first, [1, 2])))
    w.run()
    assert again.cached_tokens == 59
    # One that does fill it gets it.
    filling = w.submit(ask(text(20, 3), 230))
    w.run()
    assert (filling.reason, len(filling.ids)) == (FinishReason.LENGTH, 230)
    assert filling.ids == alone(ask(text(20, 3), 230)).ids
    w.check_all_free()


def test_it_adopts_what_its_own_memory_would_come_from() -> None:
    """The whole pool is promised to one request while its checkpoint lies in it."""
    w = world(sizes=replace(SIZES, slots=1, slabs=2, blocks=8))
    first = text(100, 1)
    one = w.submit(ask(first, 4))
    w.run()
    ids = then(first, one.ids, text(4, 2))
    two = w.submit(ask(ids, 128 - len(ids)))
    w.run()
    assert two.cached_tokens == 103
    assert two.ids == alone(ask(ids, 128 - len(ids))).ids
    w.check_all_free()


def test_one_that_matters_more_gets_the_place() -> None:
    w = world(limits={"max_seqs": 1})
    low = w.submit(ask(text(60, 1), 40, priority=1))
    w.run(until=0.15)
    assert 5 < len(low.ids) < 30
    at = len(low.ids)
    high = w.submit(ask(text(20, 2), 5))
    while high.reason is None:
        assert w.clock.step()
        w.scheduler.check()
    assert len(low.ids) <= at + 1
    w.run()
    assert low.ids == alone(ask(text(60, 1), 40)).ids
    assert low.admitted_count == 1
    assert w.scheduler.snapshot().preemptions == 1
    # It went on from its checkpoint: nothing of its prompt was computed again.
    assert computed(w) == 80
    w.check_all_free()


def test_the_next_turn_passes_a_prompt_that_does_not_fit() -> None:
    """And a new prompt does not; nor does anybody pass when there is room."""
    small = replace(ROOMY, blocks=24)
    for blocks_of_first, order in ((15, ["turn", "large", "new"]), (1, ["large", "new", "turn"])):
        w = world(sizes=small)
        one = w.submit(ask(text(40, 1), 5))
        w.run()
        came: list[str] = []

        def named(name: str, ids: np.ndarray, new: int, w: World = w, came: Any = came) -> None:
            w.submit(ask(ids, new), lambda e, _: came.append(name) if e == "admitted" else None)

        w.submit(ask(text(20, 2), 16 * blocks_of_first - 20 if blocks_of_first > 1 else 2))
        w.run(until=w.clock.now() + 0.02)
        named("large", text(200, 3), 30)
        named("new", text(50, 4), 20)
        named("turn", then(text(40, 1), one.ids, text(5, 5)), 3)
        w.run()
        assert came == order
        w.check_all_free()


def test_it_gives_way_a_bounded_number_of_times() -> None:
    w = world(limits={"max_seqs": 1})
    low = w.submit(ask(text(60, 1), 60, priority=1, sampling=job().sampling))
    high: list[Recorder] = []
    for i in range(6):
        later = ask(text(20, 2 + i), 3)
        w.clock.call_later(0.1 + 0.1 * i, lambda j=later: high.append(w.submit(j)))
    w.run()
    assert w.scheduler.snapshot().preemptions == 2
    assert low.ids == alone(ask(text(60, 1), 60)).ids
    assert all(r.reason is FinishReason.LENGTH for r in high)


def test_equals_never_give_way() -> None:
    w = world(limits={"max_seqs": 1})
    w.submit(ask(text(60, 1), 20))
    w.clock.call_later(0.1, lambda: w.submit(ask(text(20, 2), 5)))
    w.run()
    assert w.scheduler.snapshot().preemptions == 0


def test_without_a_cache_nothing_is_kept() -> None:
    w = World(ROOMY)
    for _ in range(2):
        got = w.submit(ask(text(60, 1), boundaries=(20, 50)))
        w.run()
        assert got.cached_tokens == 0
    assert w.scheduler.snapshot().cache.builds == 0
    assert not w.scheduler.snapshot().cache.enabled
    assert w.scheduler.snapshot().blocks_cached == 0


def evict_all(w: World) -> None:
    cache = w.scheduler.cache
    for checkpoint in list(cache.index.checkpoints()):
        if checkpoint.device is not None:
            cache.device.evict(checkpoint)


def test_loading_delays_nobody_else() -> None:
    """While one sequence is loaded from host memory, an op a wave, another one decodes in every
    wave."""
    w = world(replace(POLICY, host_bytes=1 << 20, move_bytes=1))
    first = text(100, 1)
    w.submit(ask(first, 4))
    w.run()
    evict_all(w)
    running = w.submit(ask(text(5, 2), 60))
    w.run(until=w.clock.now() + 0.05)
    waves = spy_waves(w)
    loaded = w.submit(ask(then(first, [3, 4])))
    w.run()
    loads = [i for i, wave in enumerate(waves) if OpKind.LOAD_BLOCK in wave]
    assert len(loads) == 7
    assert all(waves[i].rows for i in loads)
    assert loaded.cached_tokens == 99
    assert loaded.ids == alone(ask(then(first, [3, 4]))).ids
    assert running.batches == [1] * 60
    w.check_all_free()


class Seen(list[OpKind]):
    """Kinds of a wave's ops, and its slots with rows."""

    def __init__(self, wave: Wave) -> None:
        super().__init__(op.kind for op in (*wave.before, *wave.after))
        self.rows = [row.slot for row in wave.rows]


def spy_waves(w: World) -> list[Seen]:
    seen: list[Seen] = []
    submit = w.engine.submit

    def spy(wave: Wave) -> bool:
        seen.append(Seen(wave))
        return submit(wave)

    w.engine.submit = spy  # type: ignore[method-assign]
    return seen


def test_growing_copies_share_their_images() -> None:
    w = world(replace(POLICY, host_bytes=1 << 20))
    ids = text(100, 1)
    used = []
    for turn in range(3):
        got = w.submit(ask(ids, 4))
        w.run()
        used.append(w.scheduler.snapshot().cache.host_bytes)
        ids = then(ids, got.ids, text(3, turn))
    slab, block = w.engine.info.slab_bytes, w.engine.info.block_bytes
    assert slab + 7 * block <= used[0] <= 2 * slab + 8 * block
    # Each later turn: a slab, and the blocks from the first partial one on.
    assert used[2] - used[0] <= 2 * (slab + 2 * block)
    w.check_all_free()


def test_a_disk_that_is_full_costs_nothing_else() -> None:
    store = MemoryStore()
    store.broken.add("write")
    w = world(sizes=replace(SIZES, slabs=6), store=store)
    for seed in range(12):
        got = w.submit(ask(text(60, seed)))
        w.run()
        assert got.reason is FinishReason.LENGTH
    assert 3 <= w.scheduler.cache.tiers.disk.write_errors <= 4  # two may be on their way
    assert store.files == {}
    w.check_all_free()


def test_the_disk_budget_holds() -> None:
    store = MemoryStore()
    probe = world(store=MemoryStore())
    file = probe.engine.info.slab_bytes + 4 * probe.engine.info.block_bytes
    w = world(sizes=replace(SIZES, slabs=6), store=store, disk_bytes=5 * file)
    for seed in range(20):
        w.submit(ask(text(60, seed)))
        w.run()
    assert w.scheduler.cache.tiers.disk.writes > 5
    assert 3 <= len(store.files) <= 5
    assert w.scheduler.snapshot().cache.disk_bytes <= 5 * file
    assert w.scheduler.snapshot().cache.disk == len(store.files)


def test_what_is_not_ours_on_disk_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged files and those of other models are not found, not read and not removed."""
    info = world().engine.info
    sizes = StateSizes(b"a" * 32, info.slab_bytes, info.block_bytes, info.block_tokens)
    slab = np.zeros(info.slab_bytes, np.uint8)
    blocks = [np.zeros(info.block_bytes, np.uint8)] * 4
    for fingerprint, seeds in ((b"a" * 32, (1, 2)), (b"b" * 32, (3, 4, 5))):
        there = DiskStore(str(tmp_path), replace(sizes, fingerprint=fingerprint))
        for seed in seeds:
            there.write(text(60, seed), Kind.PROMPT, slab, blocks)
    for number in range(3):
        (tmp_path / f"junk{number}.kslckpt").write_bytes(b"KSLCKPT1" * number)
    store = DiskStore(str(tmp_path), sizes)
    w = world()
    with caplog.at_level(logging.INFO, log.ROOT):
        w.scheduler.use_disk(Disk(store, VirtualDisk(w.clock), 1 << 30), store.scan())
        w.submit(ask(text(60, 3)))
        w.run(until=0.5)
    (line,) = [r.getMessage() for r in caplog.records if "disk" in r.getMessage()]
    assert "found=2 other_models=3 ignored=3" in line
    assert w.scheduler.snapshot().cache.disk == 2
    assert w.scheduler.snapshot().cache.reads == 0
    assert len(list(tmp_path.iterdir())) >= 8


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
async def test_flush_writes_the_ends_of_conversations(host_bytes: int) -> None:
    store = MemoryStore()
    w = world(replace(POLICY, host_bytes=host_bytes), store=store)
    talks = []
    for seed in range(3):
        got = w.submit(ask(text(60, seed), boundaries=(20, 55)))
        w.run()
        talks.append(then(text(60, seed), got.ids))
    w.scheduler.cache.tiers.flush()
    while w.scheduler.cache.tiers.busy or w.scheduler.cache.tiers.dirty:
        w.scheduler.cache.tiers.start_save()
        w.scheduler._call_turn()
        w.run()
    later = world(store=store)
    for talk in talks:
        got = later.submit(ask(then(talk, [5])))
        later.run()
        assert got.cached_tokens == len(talk) - 1
        assert got.ids == alone(ask(then(talk, [5]))).ids
    later.check_all_free()


# ------------------------------------------------------------ growing old


def aged(host_bytes: int = 0, store: MemoryStore | None = None) -> tuple[World, list[np.ndarray]]:
    """A server that three conversations left alone a second ago, and what was said in them."""
    policy = replace(POLICY, host_bytes=host_bytes)
    w = world(policy, store=store, limits={"idle_return_s": 10.0})
    talks = []
    for seed in range(3):
        got = w.submit(ask(text(60, seed), boundaries=(20, 55)))
        w.run(until=w.clock.now() + 1.0)
        talks.append(then(text(60, seed), got.ids))
    return w, talks


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_checkpoints_leave_memory_when_nothing_ran_for_long(
    monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    given_back: list[float] = []
    monkeypatch.setattr(ImagePool, "give_back", lambda _: given_back.append(w.clock.now()))
    store = MemoryStore()
    w, talks = aged(host_bytes, store)
    assert not given_back
    w.run(until=100.0)
    assert given_back, "room for images is not kept in a pause"
    assert w.scheduler.snapshot().cache.device > 3
    w.run()  # ends: nothing is left to wait for
    assert w.clock.now() < 300.0
    held = w.scheduler.snapshot().cache
    assert (held.device, held.host, held.host_bytes) == (0, 0, 0)
    assert held.disk >= 3
    memory = w.scheduler._memory
    assert memory.blocks.free == memory.blocks.count
    assert not memory.blocks.touched | memory.slabs.touched
    for talk in talks:
        got = w.submit(ask(then(talk, [5])))
        w.run(until=w.clock.now() + 1.0)
        assert got.cached_tokens == len(talk) - 1
        assert got.ids == alone(ask(then(talk, [5]))).ids
    w.run()
    assert w.scheduler.snapshot().cache.device == 0, "and once more"
    w.check_all_free()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_that_gives_memory_back_is_left_alone(ahead: bool) -> None:
    """A wave of operations alone has no rows, so nothing follows it."""
    limits = {"idle_return_s": 1.0, "submit_ahead": ahead}
    w = world(sizes=replace(ROOMY, ring_depth=1 + ahead), store=MemoryStore(), limits=limits)
    w.submit(ask(text(60, 1), 5))
    for seed in range(2, 6):  # too short for checkpoints: what they held is held no more
        w.submit(ask(text(2, seed), 1))
    w.run(until=0.9)
    before = w.engine.progress().submitted
    w.run(until=15.0)
    assert w.engine.state.dropped
    assert w.engine.progress().submitted == before + 1
    w.run()
    assert w.scheduler.snapshot().cache.device == 0
    w.check_all_free()


def test_work_that_comes_while_checkpoints_age_goes_on_from_them() -> None:
    for delay_s in (0.0, 0.005, 0.012, 0.02, 0.1):
        store = MemoryStore()
        w, talks = aged(store=store)
        while not w.scheduler.cache.tiers.flushing:
            assert w.clock.step()
        w.run(until=w.clock.now() + delay_s)
        got = w.submit(ask(then(talks[0], [5])))
        w.run(until=w.clock.now() + 1.0)
        assert got.cached_tokens == len(talks[0]) - 1
        assert got.ids == alone(ask(then(talks[0], [5]))).ids
        assert not w.scheduler.cache.tiers.flushing
        w.run()
        assert w.scheduler.snapshot().cache.device == 0
        w.check_all_free()


def test_what_cannot_be_written_stays_in_memory() -> None:
    store = MemoryStore()
    store.broken.add("write")
    w, talks = aged(store=store)
    w.run()
    assert store.files == {}
    assert w.scheduler.snapshot().cache.device >= 3
    got = w.submit(ask(then(talks[0], [5])))
    w.run()
    assert got.cached_tokens == len(talks[0]) - 1
    w.check_all_free()


def test_without_a_disk_tier_checkpoints_do_not_age() -> None:
    w, talks = aged()
    before = w.scheduler.snapshot().cache.device
    w.run()
    assert w.scheduler.snapshot().cache.device == before
    got = w.submit(ask(then(talks[2], [5])))
    w.run()
    assert got.cached_tokens == len(talks[2]) - 1
