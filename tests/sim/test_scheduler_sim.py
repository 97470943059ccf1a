"""The scheduler under seeded random load in virtual time.

After every callback the pools are conserved (World.run), the fake engine refuses waves with shared
writers and state that is not what the tokens imply, and at the end everybody was told exactly once,
everything is free, and each output is what the same job gives with the engine to itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Done, Wave
from kslserve.errors import EnginePoisoned, KslError, QueueFull
from kslserve.sched.admit import OVERTAKES_MAX
from kslserve.sched.scheduler import Job
from tests.world import SIZES, Recorder, World, alone, job


@dataclass
class Arrival:
    job: Job
    recorder: Recorder | None = None
    refused: KslError | None = None
    cancelled: bool = False


def random_job(rng: random.Random, seed: int) -> Job:
    temperature = rng.choice([0.0, 1.0])
    return job(
        rng.choice([1, 3, 15, 16, 17, 40, rng.randrange(1, 200)]),
        rng.choice([1, 2, 16, rng.randrange(1, 60)]),
        seed=seed,
        sampling=SamplingParams(temperature=temperature, logprobs=rng.choice([None, None, 2])),
        # A quarter of the vocabulary stops some jobs soon.
        stop_ids=tuple(range(rng.choice([0, 0, 8, 32]))),
        priority=rng.choice([0, 0, 0, -1, 2]),
        side=rng.random() < 0.3,
    )


def play(world: World, rng: random.Random, count: int, span_s: float) -> list[Arrival]:
    """Random arrivals over a time span, some cancelled at a random time, some by their own sink,
    and some with a sink that raises."""
    arrivals = [Arrival(random_job(rng, seed)) for seed in range(count)]

    def arrive(arrival: Arrival, hook: Callable[[str, Recorder], None] | None) -> None:
        try:
            arrival.recorder = world.submit(arrival.job, hook)
        except KslError as error:
            arrival.refused = error

    def cancel(arrival: Arrival) -> None:
        if arrival.recorder is not None:
            arrival.cancelled = True
            world.cancel(arrival.recorder)

    for arrival in arrivals:
        hook = None
        kind = rng.random()
        at = rng.uniform(0, span_s)
        if kind < 0.2:
            world.clock.call_later(
                at + rng.choice([0.0, rng.uniform(0, 0.5)]), lambda a=arrival: cancel(a)
            )
        elif kind < 0.35:
            limit = rng.randrange(1, 8)

            def hook(
                event: str, recorder: Recorder, a: Arrival = arrival, limit: int = limit
            ) -> None:
                if event == "tokens" and len(recorder.ids) >= limit:
                    cancel(a)

        elif kind < 0.4:
            when = rng.choice(["admitted", "tokens"])

            def hook(
                event: str, recorder: Recorder, a: Arrival = arrival, when: str = when
            ) -> None:
                if event == when:
                    a.cancelled = True
                    raise RuntimeError("sink")

        world.clock.call_later(at, lambda a=arrival, h=hook: arrive(a, h))
    return arrivals


def check_outputs(arrivals: list[Arrival]) -> None:
    for arrival in arrivals:
        got = arrival.recorder
        if got is None:
            assert arrival.refused is not None
            continue
        assert got.reason is not None, "never ended"
        assert got.sequence is not None
        assert got.sequence.overtaken <= OVERTAKES_MAX
        expected = alone(arrival.job)
        if got.reason is FinishReason.CANCELLED:
            assert arrival.cancelled or got.error is not None
            assert got.ids == expected.ids[: len(got.ids)]
        else:
            assert got.ids == expected.ids
            assert got.reason is expected.reason
            assert got.logprobs == expected.logprobs


@pytest.mark.parametrize("seed", range(12))
def test_random_load(seed: int) -> None:
    rng = random.Random(seed)
    world = World(limits={"wave_columns": rng.choice([8, 20, 48])})
    world.faults.slow = {rng.randrange(1, 300): rng.uniform(0, 0.5) for _ in range(5)}
    arrivals = play(world, rng, 40, rng.choice([0.0, 0.5, 3.0]))
    world.run()
    check_outputs(arrivals)
    world.check_all_free()


@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_little_memory(seed: int) -> None:
    """Blocks, not slots, are what runs out."""
    rng = random.Random(100 + seed)
    sizes = rng.choice(
        [replace(SIZES, blocks=17), replace(SIZES, slots=5, slabs=3, blocks=20, wave_columns=16)]
    )
    world = World(sizes, limits={"max_queue": 10})
    arrivals = play(world, rng, 40, 0.3)
    world.run()
    check_outputs(arrivals)
    assert any(isinstance(a.refused, QueueFull) for a in arrivals)
    world.check_all_free()


@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_refused_waves(seed: int) -> None:
    rng = random.Random(200 + seed)
    world = World()
    world.faults.refuse = {rng.randrange(1, 400) for _ in range(12)}
    arrivals = play(world, rng, 40, 1.0)
    world.run()
    check_outputs(arrivals)
    assert any(a.recorder is not None and a.recorder.error is not None for a in arrivals)
    world.check_all_free()


@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_deadlines(seed: int) -> None:
    rng = random.Random(300 + seed)
    world = World(limits={"queue_timeout_s": 0.4, "request_timeout_s": 0.9})
    world.faults.slow = {rng.randrange(1, 60): 0.5 for _ in range(2)}
    arrivals = play(world, rng, 40, 0.5)
    world.run()
    check_outputs(arrivals)
    world.check_all_free()


@pytest.mark.parametrize("seed", range(10))
def test_random_load_with_a_wave_ahead(seed: int) -> None:
    rng = random.Random(500 + seed)
    sizes = replace(SIZES, ring_depth=2, blocks=rng.choice([17, 40]))
    world = World(sizes, limits={"submit_ahead": True, "queue_timeout_s": rng.choice([0.0, 0.5])})
    depths = spy_depths(world)
    world.faults.refuse = {rng.randrange(1, 400) for _ in range(rng.choice([0, 8]))}
    arrivals = play(world, rng, 40, rng.choice([0.3, 3.0]))
    world.run()
    check_outputs(arrivals)
    assert max(depths) == 2
    world.check_all_free()


def spy_depths(world: World) -> list[int]:
    """Waves in flight after each submit."""
    depths: list[int] = []
    submit = world.engine.submit

    def spy(wave: Wave) -> bool:
        accepted = submit(wave)
        progress = world.engine.progress()
        depths.append(progress.submitted - progress.completed)
        return accepted

    world.engine.submit = spy  # type: ignore[method-assign]
    return depths


def test_a_wave_ahead_leaves_no_gap() -> None:
    """While sequences just decode the engine always has the next wave; it is given up only where
    the next one depends on what the host has to see or do."""
    world = World(replace(SIZES, ring_depth=2), limits={"submit_ahead": True})
    depths = spy_depths(world)
    got = [world.submit(job(5, 50, seed=s)) for s in range(2)]
    world.run()
    assert [r.ids for r in got] == [alone(job(5, 50, seed=s)).ids for s in range(2)]
    # Not ahead: the prompts, the ends, and each new block of 16 tokens.
    assert depths.count(2) >= 40
    world.check_all_free()


@pytest.mark.parametrize("wave", [1, 2, 7, 30])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_fatal_wave_ends_everybody(wave: int, ahead: bool) -> None:
    rng = random.Random(400 + wave)
    world = World(replace(SIZES, ring_depth=1 + ahead), limits={"submit_ahead": ahead})
    world.faults.fatal.add(wave)
    arrivals = play(world, rng, 30, 0.3)
    world.run()
    check_outputs(arrivals)
    assert len(world.fatal) == 1
    assert any(
        a.recorder is not None and isinstance(a.recorder.error, EnginePoisoned) for a in arrivals
    )
    world.check_all_free()


def test_every_refused_submit() -> None:
    """The n-th submit fails, for every n of a run."""
    expected = [alone(job(30, 6, seed=s)).ids for s in range(4)]

    def run(refuse: set[int]) -> tuple[list[Recorder], int]:
        world = World(limits={"max_seqs": 2})
        world.faults.refuse = refuse
        got = [world.submit(job(30, 6, seed=s)) for s in range(4)]
        world.run()
        world.check_all_free()
        assert all(r.reason is not None for r in got)
        for ids, recorder in zip(expected, got, strict=True):
            if recorder.error is None:
                assert recorder.ids == ids
        return got, world.engine.progress().submitted

    _, submits = run(set())
    failures = 0
    for n in range(1, submits + 1):
        got, _ = run({n})
        failures += sum(r.error is not None for r in got)
    # One refusal never hurts newcomers that come together: they are tried one by one.
    assert failures >= submits - 4


def test_bounded_wait_of_a_long_request() -> None:
    """A stream of side requests that never ends cannot keep out one that needs most of the pool and
    yields to all of them by priority."""
    world = World(limits={"max_queue": 1000})
    before: list[Recorder] = []

    def hook(event: str, recorder: Recorder) -> None:
        if event == "admitted" and big.admitted_count == 0:
            before.append(recorder)

    running = [world.submit(job(5, 10, seed=s, side=True)) for s in range(4)]
    world.run(until=0.001)
    big = world.submit(job(150, 90, priority=1))
    for i in range(300):
        late = job(20, 20, seed=i, side=True, priority=-1)
        world.clock.call_later(0.002 * i, lambda j=late: world.submit(j, hook))
    while big.admitted_count == 0:
        assert world.clock.step()
        world.scheduler.check()
    assert all(r.admitted_count for r in running)
    assert len(before) == OVERTAKES_MAX
    assert world.scheduler.snapshot().queued > 20
    world.run()
    assert big.ids == alone(job(150, 90)).ids
    world.check_all_free()


def test_decoding_never_waits_longer_than_one_wave_beside_a_long_prompt() -> None:
    """A running answer gets a token in every wave while a long prompt is computed, and no wave
    takes much longer than the target once costs are known."""
    world = World(options={"wave_s": 0.004, "column_s": 0.002}, limits={"context": 256})
    times: list[float] = []

    def hook(event: str, recorder: Recorder) -> None:
        if event == "tokens":
            times.append(world.clock.now())

    world.submit(job(5, 60, seed=1), hook)
    world.run(until=0.1)
    begin = len(times)
    long = world.submit(job(200, 2, seed=2))
    waves: list[tuple[int, float]] = []
    on_done = world.scheduler._on_done

    def spy(done: Done) -> None:
        waves.append((len(done.rows), (done.ended_ns - done.started_ns) / 1e6))
        on_done(done)

    world.engine._on_done = spy
    while not long.ids:
        assert world.clock.step()
    gaps = [b - a for a, b in zip(times[begin:], times[begin + 1 :], strict=False)]
    assert len([w for w in waves if w[0] == 2]) >= 200 // 48
    assert max(gaps) <= 0.15
    assert sorted(gaps)[len(gaps) // 2] <= 0.06
    world.run()
    world.check_all_free()


def test_columns_follow_what_depth_makes_of_them() -> None:
    """A prompt whose columns cost more with every position before them is computed in ever shorter
    rows, so that waves beside a decoding row keep to their target."""
    sizes = replace(SIZES, blocks=300, blocks_per_slot=256, wave_columns=272)
    world = World(sizes, limits={"context": 4096, "wave_columns": 256})
    rows: list[tuple[int, int, float]] = []  # start, columns and seconds of the prompt's

    def duration(wave: Wave) -> float:
        took = 0.005 + sum(row.n * 0.0001 * (1 + row.start / 256) for row in wave.rows)
        rows.extend((row.start, row.n, took) for row in wave.rows if row.slot == 1 and row.n > 1)
        return took

    world.engine._duration = duration  # type: ignore[method-assign]
    world.submit(job(5, 1000, seed=1))
    world.run(until=0.3)
    deep = world.submit(job(3500, 2, seed=2))
    while not deep.ids:
        assert world.clock.step()
        world.scheduler.check()
    early = [n for start, n, _ in rows if 500 < start < 1000]
    late = [n for start, n, _ in rows if start > 3000][:-1]  # the last one is what was left
    assert max(late) < min(early)
    # The target is 50 ms, and a wave is planned for a part of it.
    assert max(took for _, _, took in rows) <= 0.06
    assert min(late) >= 0.25 * 0.05 / (0.0001 * 3500 / 256)  # and are not too short either


@pytest.mark.parametrize(("count", "prompt"), [(4, 200), (8, 96), (8, 240)])
def test_first_tokens_of_queued_prompts_come_one_by_one(count: int, prompt: int) -> None:
    """Prompts that came at the same moment are not computed side by side until all are done at
    once: the k-th first token is there when k prompts are computed."""
    sizes = replace(SIZES, slots=8, slabs=8, blocks=160)
    world = World(sizes, limits={"max_queue": 64})
    first: list[float] = []

    def hook(event: str, recorder: Recorder) -> None:
        if event == "tokens" and len(recorder.ids) == 1:
            first.append(world.clock.now())

    for seed in range(count):
        world.submit(job(prompt, 2, seed=seed), hook)
    world.run()
    assert len(first) == count
    for k, at in enumerate(first, start=1):
        assert at <= first[-1] * (k + 0.25) / count, (k, first)
    world.check_all_free()


@pytest.mark.parametrize("seed", range(4))
def test_bounded_wait(seed: int) -> None:
    """Ageing: a request waits at most for the work that was ahead of it when it came, and for
    OVERTAKES_MAX later ones, whatever their priority. Times are of the virtual clock."""
    rng = random.Random(600 + seed)
    world = World(limits={"max_queue": 1000})
    column_s, wave_s = 0.0005, 0.005

    def work(new: Job) -> float:
        """Seconds that a job takes when it has the engine to itself."""
        size = len(new.prompt_ids)
        waves = -(-size // 16) + new.max_new_tokens  # a chunk has 16 columns at least
        return waves * wave_s + (size + new.max_new_tokens) * column_s

    waits: list[tuple[float, float]] = []
    live: dict[int, Job] = {}
    biggest = 0.0

    def arrive(new: Job) -> None:
        nonlocal biggest
        biggest = max(biggest, work(new))
        ahead = sum(work(j) for j in live.values())
        arrived = world.clock.now()

        def hook(event: str, recorder: Recorder) -> None:
            assert recorder.sequence is not None
            if event == "admitted":
                waits.append((world.clock.now() - arrived, ahead))
            elif event == "ended":
                del live[recorder.sequence.number]

        recorder = world.submit(new, hook)
        assert recorder.sequence is not None
        live[recorder.sequence.number] = new

    for at in range(150):
        new = replace(random_job(rng, at), stop_ids=(), priority=rng.choice([-1, 0, 0, 5]))
        world.clock.call_later(rng.uniform(0, 2.5), lambda j=new: arrive(j))
    world.run()
    assert len(waits) == 150
    assert max(wait for wait, _ in waits) > biggest
    for wait, ahead in waits:
        assert wait <= ahead + (OVERTAKES_MAX + 1) * biggest
    world.check_all_free()
