"""The prefix cache under seeded random load in virtual time.

Conversations grow, fork, repeat and are cancelled, with too few slabs and blocks for all of them.
The fake engine knows what every slab and block holds, so a checkpoint with the wrong content, a
block with two writers or a stale copy is an error at the row that uses it. After every callback the
pools are conserved, references included; at the end all outputs are those of a server without a
cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import PoolSizes
from kslserve.sched.cache import hosttier
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job
from tests.world import SIZES, MemoryStore, Recorder, World, alone

POLICY = CachePolicy(min_tokens=4, gap=4, interval=32)
TIGHT = replace(SIZES, slabs=7, blocks=24)
ROOMY = replace(SIZES, slabs=24, blocks=120)


@dataclass
class Talk:
    """A conversation: each turn's prompt is all before it, its answer and something new."""

    ids: list[int]
    turns: int
    done: list[tuple[Job, Recorder]] = field(default_factory=list)


def make_job(rng: random.Random, ids: list[int], seed: int) -> Job:
    size = len(ids)
    boundaries = sorted({rng.randrange(1, size + 1) for _ in range(rng.randrange(3))})
    return Job(
        np.array(ids, np.int32),
        rng.choice([1, 3, rng.randrange(1, 30)]),
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([None, None, 1]),
        ),
        seed,
        stop_ids=tuple(range(rng.choice([0, 16]))),
        priority=rng.choice([0, 0, 1]),
        side=rng.random() < 0.2,
        boundaries=tuple(boundaries),
    )


class Load:
    """Conversations that start at random times from a few shared beginnings."""

    def __init__(self, world: World, rng: random.Random, talks: int, span_s: float) -> None:
        self.world = world
        self.rng = rng
        self.seed = 0
        self.finished: list[tuple[Job, Recorder]] = []
        self.cancelled: set[int] = set()
        systems = [self.text(rng.choice([5, 16, 40, 70])) for _ in range(3)]
        self.window = world.scheduler.window
        for _ in range(talks):
            ids = rng.choice(systems) + self.text(rng.randrange(1, 30))
            talk = Talk(ids, rng.randrange(1, 6))
            for _ in range(rng.choice([1, 1, 1, 4])):  # some fan out
                at = rng.uniform(0, span_s)
                world.clock.call_later(at, lambda t=talk: self.turn(list(t.ids), t.turns))

    def text(self, n: int) -> list[int]:
        return [self.rng.randrange(512) for _ in range(n)]

    def turn(self, ids: list[int], left: int) -> None:
        if len(ids) + 1 >= self.window or not left:
            return
        rng = self.rng
        self.seed += 1
        job = make_job(rng, ids, self.seed)
        quits = rng.random() < 0.15

        def hook(event: str, recorder: Recorder) -> None:
            if event == "tokens" and quits and len(recorder.ids) > 2:
                self.world.cancel(recorder)
            if event == "ended":
                self.next(ids, recorder, left)

        recorder = self.world.submit(job, hook)
        self.finished.append((job, recorder))
        if rng.random() < 0.15:
            self.world.clock.call_later(rng.uniform(0, 0.2), lambda: self.world.cancel(recorder))

    def next(self, ids: list[int], recorder: Recorder, left: int) -> None:
        """What this client does after an answer."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.15:
            follow = list(ids)  # the same again
        elif kind < 0.25:
            at = rng.randrange(len(ids))
            follow = ids[:at] + self.text(rng.randrange(1, 20))  # an edit
        else:
            follow = ids + recorder.ids + self.text(rng.randrange(1, 20))
        self.world.clock.call_later(
            rng.choice([0.0, rng.uniform(0, 0.1)]), lambda: self.turn(follow, left - 1)
        )

    def check(self) -> None:
        for job, got in self.finished:
            assert got.reason is not None, "never ended"
            expected = alone(replace(job, boundaries=()), sizes=SIZES)
            if got.reason is FinishReason.CANCELLED:
                assert got.ids == expected.ids[: len(got.ids)]
            else:
                assert got.ids == expected.ids
                assert got.logprobs == expected.logprobs
            assert got.cached_tokens < len(job.prompt_ids)
        cache = self.world.scheduler.cache
        admitted = [r for _, r in self.finished if r.admitted_count]
        assert sum(r.cached_tokens for r in admitted) <= cache.tokens_saved


def play(
    seed: int,
    sizes: PoolSizes,
    talks: int = 12,
    policy: CachePolicy = POLICY,
    store: MemoryStore | None = None,
    disk_bytes: int = 1 << 40,
    broken: float = 0.0,
    **more: object,
) -> Load:
    rng = random.Random(seed)
    limits = {"cache": policy, "max_queue": 1000, **more}
    world = World(sizes, limits=limits, store=store, disk_bytes=disk_bytes)
    if store is not None and broken:
        for _ in range(20):
            breaks = {m for m in ("read", "write") if rng.random() < broken}
            world.clock.call_later(rng.uniform(0, 3), lambda b=breaks: setattr(store, "broken", b))
    load = Load(world, rng, talks, rng.choice([0.0, 0.5, 2.0]))
    world.run()
    load.check()
    world.check_all_free()
    return load


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_random_conversations(seed: int, sizes: PoolSizes) -> None:
    load = play(seed, sizes)
    assert load.world.scheduler.cache.hits


@pytest.mark.parametrize("seed", range(6))
def test_with_a_wave_ahead(seed: int) -> None:
    play(seed, replace(TIGHT, ring_depth=2), submit_ahead=True)


def test_unused_memory_goes_back_in_between() -> None:
    """In every pause, however short; the fake engine spoils what is dropped."""
    dropped = 0
    for seed in range(6):
        dropped += play(seed, TIGHT, talks=3, idle_return_s=0.002).world.engine.state.dropped
    assert dropped > 10


def test_sequences_give_way_and_go_on() -> None:
    """In some of these runs a sequence is preempted; all outputs are right anyway."""
    preempted = 0
    for seed in range(6):
        sizes = replace(SIZES, slots=2, slabs=5, blocks=18)
        preempted += play(seed, sizes).world.scheduler.snapshot().preemptions
    assert preempted


@pytest.mark.parametrize("seed", range(4))
def test_with_refused_waves(seed: int) -> None:
    rng = random.Random(900 + seed)
    world = World(TIGHT, limits={"cache": POLICY, "max_queue": 1000})
    world.faults.refuse = {rng.randrange(1, 300) for _ in range(12)}
    load = Load(world, rng, 12, 0.5)
    world.run()
    load.check()
    assert any(r.error is not None for _, r in load.finished)
    world.check_all_free()


# An image of the fake engine: a slab is about 2 KiB, a block 136 bytes.
HOST = replace(POLICY, host_bytes=40_000, disk_min_tokens=4, move_bytes=3000)
DISK = replace(HOST, host_bytes=0)


@pytest.mark.parametrize("seed", range(6))
def test_with_a_host_tier(seed: int) -> None:
    load = play(seed, TIGHT, policy=HOST)
    tiers = load.world.scheduler.cache.tiers
    assert tiers.host.used == 0  # cleared at the end


@pytest.mark.parametrize("policy", [HOST, DISK], ids=["host", "no host"])
def test_with_a_disk_tier(policy: CachePolicy) -> None:
    reads = []
    for seed in range(6):
        store = MemoryStore()
        load = play(seed, TIGHT, policy=policy, store=store)
        assert load.world.scheduler.cache.tiers.disk.writes
        # A restart: the same clients again find what the first run left.
        again = play(seed, TIGHT, policy=policy, store=store)
        reads.append(again.world.scheduler.cache.tiers.disk.reads)
    assert sum(map(bool, reads)) > len(reads) // 2


@pytest.mark.parametrize("policy", [HOST, DISK], ids=["host", "no host"])
@pytest.mark.parametrize("way", [0, 9000])
def test_images_are_bounded(monkeypatch: pytest.MonkeyPatch, policy: CachePolicy, way: int) -> None:
    """At any moment those of the tier and those that move take no more than the budget, and the way
    or the largest checkpoint. With little room everything comes all the same, one by one."""
    monkeypatch.setattr(hosttier, "WAY_BYTES", way)
    policy = replace(policy, host_bytes=min(policy.host_bytes, 8000))
    taken: list[int] = []
    check = hosttier.HostTier.check

    def look(host: hosttier.HostTier, *arguments: Any) -> None:
        check(host, *arguments)
        taken.append(host.used + host.coming)

    monkeypatch.setattr(hosttier.HostTier, "check", look)
    store = MemoryStore()
    reads = 0
    for seed in range(4):
        load = play(seed % 2, TIGHT, policy=policy, store=store)
        tiers = load.world.scheduler.cache.tiers
        assert tiers.disk.writes or seed > 1
        assert tiers.host.coming == 0
        reads += tiers.disk.reads
        info = load.world.engine.info
        largest = info.slab_bytes + TIGHT.blocks_per_slot * info.block_bytes
        assert 0 < max(taken) <= policy.host_bytes + max(way, largest)
    assert reads


@pytest.mark.parametrize("seed", range(4))
def test_with_a_disk_that_fails_at_times(seed: int) -> None:
    store = MemoryStore()
    play(seed, TIGHT, policy=DISK, store=store, disk_bytes=30_000)
    play(seed, TIGHT, policy=HOST, store=store, disk_bytes=30_000, broken=0.5)
    store.broken = set()


@pytest.mark.parametrize("seed", range(4))
def test_tiers_with_refused_waves(seed: int) -> None:
    rng = random.Random(700 + seed)
    world = World(TIGHT, limits={"cache": HOST, "max_queue": 1000}, store=MemoryStore())
    world.faults.refuse = {rng.randrange(1, 600) for _ in range(40)}
    load = Load(world, rng, 12, 0.5)
    world.run()
    load.check()
    world.check_all_free()
