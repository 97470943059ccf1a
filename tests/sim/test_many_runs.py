"""A thousand short runs in virtual time with everything in them: few slots, slabs and blocks, a
shared beginning, priorities, drafts, a wave ahead, tiers, pauses, cancellations, deadlines, and
every call of the engine and the disk that can fail.

As in the longer simulations, the pools are conserved after every callback, the fake engine refuses
rows that meet and state that is not what the tokens imply, everybody is told of one end, and who
was not cut short has the output that it would have had alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import PoolSizes
from kslserve.errors import EnginePoisoned, KslError
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job
from kslserve.sched.spec.policy import SpecPolicy
from tests.world import SIZES, MemoryStore, Recorder, World, alone

RUNS = 1000
STEPS_MAX = 20_000
POLICY = CachePolicy(min_tokens=4, gap=4, interval=24, disk_min_tokens=4, move_bytes=3000)
ALWAYS = SpecPolicy(always=True)


def random_sizes(rng: random.Random) -> PoolSizes:
    slots = rng.randrange(1, 5)
    return replace(
        SIZES, slots=slots, slabs=slots + rng.randrange(5), blocks=rng.randrange(8, 30),
        ring_depth=rng.choice([1, 2]), wave_columns=128,
    )  # fmt: skip


def random_world(rng: random.Random, sizes: PoolSizes, store: MemoryStore | None) -> World:
    host = rng.choice([0, 0, 20_000])
    cache = rng.choice([None, *[replace(POLICY, host_bytes=host)] * 3])
    world = World(
        sizes,
        limits={
            "max_queue": rng.choice([1, 64]),
            "wave_columns": rng.choice([16, 48]),
            "queue_timeout_s": rng.choice([0.0, 0.0, 0.05]),
            "request_timeout_s": rng.choice([0.0, 0.0, 0.2]),
            "idle_return_s": rng.choice([0.0, 0.003]),
            "ahead_bytes": rng.choice([0, 3000, 10_000]),
            "submit_ahead": sizes.ring_depth == 2,
            "cache": cache,
            "spec": rng.choice([None, None, SpecPolicy(), ALWAYS]),
        },
        options={"has_mtp": True},
        store=store if cache is not None else None,
        disk_bytes=rng.choice([1 << 40, 8000]),
    )
    faults = world.faults
    if rng.random() < 0.5:
        faults.refuse = {rng.randrange(1, 60) for _ in range(4)}
    if rng.random() < 0.15:
        faults.fatal = {rng.randrange(1, 40)}
    if rng.random() < 0.3:
        faults.slow = {rng.randrange(1, 40): rng.uniform(0, 0.2)}
    if store is not None and rng.random() < 0.4:
        store.broken = {m for m in ("read", "write") if rng.random() < 0.5}
    return world


def random_jobs(rng: random.Random, window: int) -> list[Job]:
    """Some with a beginning in common."""
    shared = [rng.randrange(512) for _ in range(rng.randrange(1, 60))]
    jobs = []
    for seed in range(rng.randrange(1, 7)):
        own = [rng.randrange(512) for _ in range(rng.randrange(1, 30))]
        ids = ([*shared, *own] if rng.random() < 0.6 else own)[: window - 1]
        boundaries = tuple(sorted({rng.randrange(1, len(ids) + 1) for _ in range(2)}))
        jobs.append(
            Job(
                np.array(ids, np.int32),
                rng.randrange(1, 12),
                SamplingParams(temperature=rng.choice([0.0, 1.0])),
                seed,
                stop_ids=tuple(range(rng.choice([0, 16]))),
                priority=rng.choice([0, 0, 1]),
                side=rng.random() < 0.3,
                boundaries=boundaries,
            )
        )
    return jobs


def play(world: World, rng: random.Random, jobs: list[Job]) -> int:
    """All jobs, at random moments; how many ran to their own end."""
    heard: list[tuple[Job, Recorder]] = []
    cancelled: set[int] = set()

    def arrive(job: Job, leaves_at: float | None) -> None:
        try:
            recorder = world.submit(job)
        except KslError:
            return
        heard.append((job, recorder))
        if leaves_at is not None:
            world.clock.call_later(leaves_at, lambda: leave(job.seed, recorder))

    def leave(number: int, recorder: Recorder) -> None:
        cancelled.add(number)
        world.cancel(recorder)

    for job in jobs:
        leaves_at = rng.uniform(0, 0.1) if rng.random() < 0.25 else None
        at = rng.choice([0.0, rng.uniform(0, 0.3)])
        world.clock.call_later(at, lambda j=job, t=leaves_at: arrive(j, t))
    for _ in range(STEPS_MAX):
        if not world.clock.step():
            break
        world.scheduler.check()
    else:
        raise AssertionError("it goes on for ever")
    whole = 0
    for job, got in heard:
        assert got.reason is not None, "never ended"
        expected = alone(replace(job, boundaries=()), world.sizes)
        if got.reason is FinishReason.CANCELLED:
            assert job.seed in cancelled or got.error is not None
            assert got.ids == expected.ids[: len(got.ids)]
        else:
            assert (got.ids, got.reason) == (expected.ids, expected.reason)
            whole += 1
        if isinstance(got.error, EnginePoisoned):
            assert world.fatal
    world.check_all_free()
    return whole


def worlds(seed: int) -> Iterator[tuple[World, int]]:
    """One run, and one after a restart where there is a disk; with how many jobs ran to their own
    end."""
    rng = random.Random(seed)
    sizes = random_sizes(rng)
    store = MemoryStore() if rng.random() < 0.3 else None
    world = random_world(rng, sizes, store)
    jobs = random_jobs(rng, world.scheduler.window)
    yield world, play(world, rng, jobs)
    if store is not None:
        store.broken = set()
        again = random_world(rng, sizes, store)
        yield again, play(again, rng, jobs)


@pytest.mark.parametrize("part", range(4))
def test_many_short_runs(part: int) -> None:
    """And of all that can happen, everything did."""
    seen: Counter[str] = Counter()
    for seed in range(part * RUNS // 4, (part + 1) * RUNS // 4):
        try:
            for world, whole in worlds(seed):
                snapshot = world.scheduler.snapshot()
                counts = world.metrics.labelled
                events = counts("scheduler_events_total", "", "")
                seen["whole"] += whole
                seen["fatal"] += len(world.fatal)
                seen["refused"] += events["refused_wave"].value + events["admission_failure"].value
                seen["too late"] += events["queue_timeout"].value + events["request_timeout"].value
                seen["gave way"] += snapshot.preemptions
                seen["adopted"] += snapshot.cache.hits
                seen["read"] += snapshot.cache.reads
                seen["drafted"] += counts("speculative_tokens_total", "", "")["drafted"].value
                seen["dropped"] += world.engine.state.dropped
        except Exception as error:
            error.add_note(f"in the run of seed {seed}")
            raise
    assert len(seen) == 9
    assert min(seen.values()) > 0, seen
