"""The scheduler's turn: order of events, ends, limits, cancellation, faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.fake import FakeEngine
from kslserve.engine.fakemodel import HashModel, Slot, Timeline
from kslserve.engine.types import RowKind, Wave
from kslserve.errors import (
    BadLogits,
    ContextLengthExceeded,
    EngineError,
    EnginePoisoned,
    InvalidRequest,
    KslError,
    QueueFull,
    RequestExpired,
    Unavailable,
)
from kslserve.metrics import Metrics
from kslserve.sched.scheduler import SchedLimits, Scheduler
from tests.world import SIZES, Recorder, World, alone, job


def spy_waves(world: World) -> list[Wave]:
    """Every wave as it is submitted, rows copied since they are reused."""
    seen: list[Wave] = []
    submit = world.engine.submit

    def spy(wave: Wave) -> bool:
        accepted = submit(wave)
        if accepted:
            rows = [replace(row, tokens=list(row.tokens)) for row in wave.rows]
            seen.append(Wave(wave.id, rows, list(wave.before), [], list(wave.edits)))
        return accepted

    world.engine.submit = spy  # type: ignore[method-assign]
    return seen


def test_one_job_from_start_to_end() -> None:
    world = World()
    waves = spy_waves(world)
    got = world.submit(job(20, 3))
    assert got.admitted_count == 0  # sinks are never called from inside submit
    world.run()
    assert (got.reason, got.error) == (FinishReason.LENGTH, None)
    assert got.batches == [1, 1, 1]
    kinds = [(w.rows[0].kind, w.rows[0].start, w.rows[0].n) for w in waves]
    assert kinds == [(RowKind.LAST, 0, 20), (RowKind.LAST, 20, 1), (RowKind.LAST, 21, 1)]
    assert [w.rows[0].tokens for w in waves[1:]] == [[got.ids[0]], [got.ids[1]]]
    assert [len(w.before) for w in waves] == [2, 0, 0]
    assert [len(w.edits) for w in waves] == [1, 0, 0]
    world.check_all_free()


def test_long_prompts_run_in_chunks() -> None:
    world = World()
    waves = spy_waves(world)
    got = world.submit(job(150, 2))
    world.run()
    rows = [w.rows[0] for w in waves]
    assert [r.start for r in rows] == [0, *np.cumsum([r.n for r in rows])[:-1]]
    assert all(r.n <= 48 for r in rows)
    assert [r.kind for r in rows[:-2]] == [RowKind.PREFILL] * (len(rows) - 2)
    assert len(got.ids) == 2


def test_the_next_wave_is_submitted_before_sinks_are_called() -> None:
    world = World()
    in_flight: list[bool] = []

    def hook(event: str, recorder: Recorder) -> None:
        in_flight.append(world.scheduler.snapshot().in_flight)

    world.submit(job(5, 3), hook)
    world.run()
    assert in_flight == [True, True, True, False, False]  # nothing follows the last token


def test_jobs_of_one_moment_share_a_wave() -> None:
    world = World()
    waves = spy_waves(world)
    for seed in range(4):
        world.submit(job(5, 3, seed=seed))
    world.run()
    assert [len(w.rows) for w in waves] == [4, 4, 4]


def test_a_new_job_joins_running_ones() -> None:
    world = World()
    waves = spy_waves(world)
    first = world.submit(job(5, 10, seed=1))
    world.run(until=0.02)
    second = world.submit(job(5, 10, seed=2))
    world.run()
    assert max(len(w.rows) for w in waves) == 2
    assert first.ids == alone(job(5, 10, seed=1)).ids
    assert second.ids == alone(job(5, 10, seed=2)).ids


def test_steady_decoding_reuses_the_row_list() -> None:
    world = World()
    lists: list[int] = []
    submit = world.engine.submit

    def spy(wave: Wave) -> bool:
        lists.append(id(wave.rows))
        return submit(wave)

    world.engine.submit = spy  # type: ignore[method-assign]
    world.submit(job(5, 8, seed=1))
    world.submit(job(5, 8, seed=2))
    world.run()
    assert len(set(lists[1:])) == 1


def test_stop_id_ends_and_is_reported() -> None:
    free = alone(job(5, 8))
    stop = free.ids[3]
    got = alone(job(5, 8, stop_ids=(stop,)))
    assert got.ids == free.ids[: free.ids.index(stop) + 1]
    assert got.reason is FinishReason.STOP


def test_window_limits_the_output() -> None:
    world = World(limits={"context": 30})
    by_window = world.submit(job(20, 500))
    by_length = world.submit(job(20, 9))
    world.run()
    assert (len(by_window.ids), by_window.reason) == (10, FinishReason.WINDOW)
    assert (len(by_length.ids), by_length.reason) == (9, FinishReason.LENGTH)
    with pytest.raises(ContextLengthExceeded) as caught:
        world.submit(job(30, 1))
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (30, 30)


def test_window_is_what_the_pools_can_hold() -> None:
    world = World(replace(SIZES, blocks=3))
    assert world.scheduler.window == 48
    got = world.submit(job(40, 500))
    world.run()
    assert (len(got.ids), got.reason) == (8, FinishReason.WINDOW)


def test_jobs_without_prompt_or_output_are_refused() -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.submit(job(0, 1))
    with pytest.raises(InvalidRequest):
        world.submit(job(1, 0))


def test_logprobs_reach_the_sink() -> None:
    got = alone(job(5, 3, sampling=SamplingParams(logprobs=2)))
    assert [entry[0][0] for entry in got.logprobs] == got.ids
    assert all(len(entry) == 3 for entry in got.logprobs)


def test_forced_ids_are_sampled() -> None:
    got = alone(job(5, 4, forced=np.array([7, 8, 9], dtype=np.int32)))
    assert got.ids[:3] == [7, 8, 9]


def test_queue_bound() -> None:
    world = World(limits={"max_queue": 2})
    for seed in range(6):
        world.submit(job(5, 50, seed=seed))
    with pytest.raises(QueueFull) as caught:
        world.submit(job(5, 5))
    assert caught.value.retry_after_s
    world.run(until=0.01)
    with pytest.raises(QueueFull):
        world.submit(job(5, 5))
    assert world.scheduler.snapshot().queued == 2
    assert world.metrics.labelled("requests", "", "")["queued"].value == 2
    world.run()
    world.check_all_free()


def test_a_queue_of_none_still_serves() -> None:
    world = World(limits={"max_queue": 0, "max_seqs": 1})
    got = world.submit(job())
    with pytest.raises(QueueFull):
        world.submit(job())
    world.run()
    assert got.reason is FinishReason.LENGTH
    assert world.submit(job())


def test_priority_then_side_then_arrival() -> None:
    world = World(limits={"max_seqs": 1})
    order: list[str] = []

    def named(name: str, **changes: object) -> None:
        def hook(event: str, recorder: Recorder) -> None:
            if event == "admitted":
                order.append(name)

        world.submit(job(5, 2, **changes), hook)

    named("running")
    world.run(until=0.001)
    named("plain")
    named("later")
    named("side", side=True)
    named("urgent", priority=-1)
    named("patient", priority=1, side=True)
    world.run()
    assert order == ["running", "urgent", "side", "plain", "later", "patient"]


def test_queue_timeout() -> None:
    world = World(limits={"max_seqs": 1, "queue_timeout_s": 0.1})
    running = world.submit(job(5, 100, seed=1))
    waiting = world.submit(job(5, 5, seed=2))
    world.run()
    assert running.reason is FinishReason.LENGTH
    assert waiting.admitted_count == 0
    assert isinstance(waiting.error, Unavailable)
    assert waiting.error.retry_after_s


def test_queue_timeout_fires_while_a_wave_is_stuck() -> None:
    world = World(limits={"max_seqs": 1, "queue_timeout_s": 1.0})
    world.faults.slow[2] = 60.0
    world.submit(job(5, 5, seed=1))
    waiting = world.submit(job(5, 5, seed=2))
    world.run(until=2.0)
    assert isinstance(waiting.error, Unavailable)
    world.run()
    world.check_all_free()


def test_request_timeout_ends_running_and_waiting() -> None:
    world = World(limits={"max_seqs": 1, "request_timeout_s": 0.1})
    running = world.submit(job(5, 200, seed=1))
    waiting = world.submit(job(5, 5, seed=2))
    world.run()
    assert isinstance(running.error, RequestExpired)
    assert isinstance(waiting.error, RequestExpired)
    assert running.ids == alone(job(5, 200, seed=1)).ids[: len(running.ids)]
    assert 5 < len(running.ids) < 100
    world.check_all_free()


def test_cancel_in_the_queue_ends_soon() -> None:
    world = World(limits={"max_seqs": 1})
    world.faults.slow[1] = 60.0
    world.submit(job(5, 2, seed=1))
    waiting = world.submit(job(5, 2, seed=2))
    world.run(until=0.001)
    world.cancel(waiting)
    assert waiting.reason is None  # sinks are never called from inside cancel
    world.run(until=0.002)
    assert (waiting.reason, waiting.error) == (FinishReason.CANCELLED, None)
    world.run()
    world.check_all_free()


@pytest.mark.parametrize("when", [0.001, 0.08, 0.2], ids=["first chunk", "later chunk", "decode"])
def test_cancel_in_flight_ends_with_the_wave(when: float) -> None:
    world = World()
    got = world.submit(job(130, 60))
    world.run(until=when)
    count = len(got.ids)
    world.cancel(got, Unavailable("gone"))
    world.cancel(got)
    assert world.scheduler.snapshot().running == 1
    world.run()
    assert len(got.ids) == count  # tokens after the mark are dropped
    assert got.reason is FinishReason.CANCELLED
    assert isinstance(got.error, Unavailable)
    world.check_all_free()


def test_cancel_from_a_sink() -> None:
    world = World()

    def hook(event: str, recorder: Recorder) -> None:
        if event == "tokens" and len(recorder.ids) == 3:
            world.cancel(recorder)

    got = world.submit(job(5, 50), hook)
    world.run()
    assert len(got.ids) == 3
    assert (got.reason, got.error) == (FinishReason.CANCELLED, None)
    world.check_all_free()


def test_cancel_of_another_drops_its_tokens_of_the_same_wave() -> None:
    world = World()
    others: list[Recorder] = []

    def hook(event: str, recorder: Recorder) -> None:
        if event == "tokens" and len(recorder.ids) == 3:
            world.cancel(others[0])

    world.submit(job(5, 6, seed=1), hook)
    others.append(world.submit(job(5, 50, seed=2)))
    world.run()
    assert len(others[0].ids) == 2
    assert others[0].reason is FinishReason.CANCELLED
    world.check_all_free()


def test_a_sink_may_submit() -> None:
    world = World()
    second: list[Recorder] = []

    def hook(event: str, recorder: Recorder) -> None:
        if event == "ended":
            second.append(world.submit(job(5, 2, seed=9)))

    world.submit(job(5, 2), hook)
    world.run()
    assert second[0].ids == alone(job(5, 2, seed=9)).ids


@pytest.mark.parametrize("bad_event", ["admitted", "tokens", "ended"])
def test_a_sink_that_raises_ends_only_its_own(bad_event: str) -> None:
    world = World()

    def hook(event: str, recorder: Recorder) -> None:
        if event == bad_event:
            raise RuntimeError("sink")

    bad = world.submit(job(5, 6, seed=1), hook)
    good = world.submit(job(5, 6, seed=2))
    world.run()
    assert good.ids == alone(job(5, 6, seed=2)).ids
    assert bad.reason is not None
    assert isinstance(bad.error, KslError) == (bad_event != "ended")
    world.check_all_free()


def test_a_sink_that_raises_on_its_last_token_fails() -> None:
    world = World()

    def hook(event: str, recorder: Recorder) -> None:
        if event == "tokens":
            raise RuntimeError("sink")

    got = world.submit(job(5, 1), hook)
    world.run()
    assert got.error is not None


def test_refused_wave_blames_the_newcomer() -> None:
    world = World()
    old = world.submit(job(5, 20, seed=1))
    world.run(until=0.02)
    world.faults.refuse.add(world.engine.progress().submitted + 1)
    new = world.submit(job(5, 5, seed=2))
    world.run()
    assert old.ids == alone(job(5, 20, seed=1)).ids
    assert isinstance(new.error, EngineError)
    assert new.admitted_count == 0
    world.check_all_free()


def test_one_bad_newcomer_does_not_end_the_others() -> None:
    world = World(limits={"max_seqs": 4})
    waves = spy_waves(world)
    old = world.submit(job(5, 30, seed=0))
    world.run(until=0.02)
    new = [world.submit(job(5, 8, seed=s)) for s in range(1, 5)]
    assert new[1].sequence is not None
    new[1].sequence.job.stop_ids = tuple(range(33))  # more than an engine takes
    world.run()
    for seed, recorder in enumerate([old, *new]):
        if recorder is new[1]:
            assert isinstance(recorder.error, EngineError)
            assert recorder.admitted_count == 0
        else:
            expected = alone(job(5, 30 if recorder is old else 8, seed=seed))
            assert recorder.ids == expected.ids
    assert any(len(w.rows) == 4 for w in waves)
    world.check_all_free()


def test_refused_wave_without_newcomers_ends_its_rows() -> None:
    world = World(limits={"max_seqs": 2})
    first = [world.submit(job(5, 20, seed=s)) for s in range(2)]
    waiting = world.submit(job(5, 5, seed=7))
    world.faults.refuse.add(3)
    world.run()
    assert all(isinstance(r.error, EngineError) for r in first)
    assert waiting.ids == alone(job(5, 5, seed=7)).ids
    world.check_all_free()


def test_full_ring_is_tried_again() -> None:
    world = World()
    submit = world.engine.submit
    refusals = iter([False, False])

    def busy(wave: Wave) -> bool:
        return next(refusals, True) and submit(wave)

    world.engine.submit = busy  # type: ignore[method-assign]
    got = world.submit(job(5, 4))
    world.run()
    assert got.ids == alone(job(5, 4)).ids


def test_fatal_wave_ends_everything() -> None:
    world = World(limits={"max_seqs": 2})
    world.faults.fatal.add(4)
    jobs = [world.submit(job(5, 20, seed=s)) for s in range(4)]
    cancelled = world.submit(job(5, 20, seed=9))
    world.run(until=0.001)
    world.cancel(cancelled)
    world.run()
    assert all(isinstance(r.error, EnginePoisoned) for r in jobs)
    assert world.fatal == ["Wave 4 failed by a fault hook."]
    assert world.scheduler.snapshot().fatal == world.fatal[0]
    with pytest.raises(EnginePoisoned):
        world.submit(job())
    world.check_all_free()


def test_fatal_wave_ends_a_sequence_that_was_cancelled_in_it() -> None:
    world = World()
    world.faults.fatal.add(1)
    got = world.submit(job(5, 20))
    world.run(until=0.001)
    world.cancel(got)
    world.run()
    assert (got.reason, got.error) == (FinishReason.CANCELLED, None)
    world.check_all_free()


def test_bad_logits_are_an_error_of_one_sequence() -> None:
    class Broken(HashModel):
        def token(self, slot: Slot, timeline: Timeline) -> int:
            broken = slot.config is not None and slot.config.seed == 1 and slot.sampled == 2
            return -1 if broken else super().token(slot, timeline)

    world = World(options={"model": Broken(512)})
    bad = world.submit(job(5, 6, seed=1))
    good = world.submit(job(5, 6, seed=2))
    world.run()
    assert isinstance(bad.error, BadLogits)
    assert len(bad.ids) == 2
    assert good.reason is FinishReason.LENGTH


def test_memory_is_not_reused_while_its_wave_runs() -> None:
    """A sequence that was set up by the wave in flight, but got no row in it, ends at once; its
    place stays away from others until that wave is complete."""
    world = World(limits={"wave_columns": 16})
    first = world.submit(job(100, 5, seed=1))
    second = world.submit(job(100, 5, seed=2))
    third = world.submit(job(100, 5, seed=3))
    world.run(until=0.001)
    world.cancel(third)
    fourth = world.submit(job(100, 5, seed=4))
    fifth = world.submit(job(100, 5, seed=5))
    world.run(until=0.002)
    assert third.reason is FinishReason.CANCELLED
    snapshot = world.scheduler.snapshot()
    assert (snapshot.waves, snapshot.queued, snapshot.running) == (0, 2, 2)
    world.run()
    assert fourth.ids == alone(job(100, 5, seed=4)).ids
    assert fifth.ids == alone(job(100, 5, seed=5)).ids
    assert first.ids == alone(job(100, 5, seed=1)).ids
    assert second.ids == alone(job(100, 5, seed=2)).ids
    world.check_all_free()


def test_metrics_and_snapshot() -> None:
    world = World()
    world.submit(job(20, 3, seed=1))
    world.submit(job(30, 4, seed=2))
    world.run(until=0.001)
    snapshot = world.scheduler.snapshot()
    requests = world.metrics.labelled("requests", "", "")
    assert (snapshot.running, requests["prefilling"].value, requests["decoding"].value) == (2, 2, 0)
    blocks = world.metrics.labelled("kv_blocks", "", "")
    assert blocks["free"].value == snapshot.blocks_free == 40 - 2 - 3
    assert blocks["total"].value == 40
    assert (snapshot.slots_free, snapshot.slabs_free, snapshot.slots_total) == (2, 2, 4)
    assert (snapshot.waves, snapshot.in_flight, snapshot.wave_age_s) == (0, True, 0.001)
    world.engine.graphs, world.engine.graph_kernels, world.engine.graphs_made = 3, 90, 5
    world.scheduler.snapshot()
    assert world.metrics.gauge("graphs", "").value == 3
    assert world.metrics.gauge("graph_kernels", "").value == 90
    assert world.metrics.counter("graphs_made_total", "").value == 5
    world.run()
    snapshot = world.scheduler.snapshot()
    gaps = world.metrics.histogram("inter_token_seconds", "", ())
    assert 0 < gaps.count <= 7
    assert gaps.sum / gaps.count == pytest.approx(0.00575, rel=0.1)  # wave and column times
    assert (snapshot.prompt_tokens, snapshot.output_tokens) == (50, 7)
    assert world.metrics.counter("waves_total", "").value == snapshot.waves
    assert world.metrics.histogram("wave_seconds", "", ()).count == snapshot.waves
    assert world.metrics.labelled("sequences_ended_total", "", "")["length"].value == 2
    assert blocks["free"].value == 40


def test_close_ends_everything_and_is_idempotent() -> None:
    world = World(limits={"max_seqs": 1})
    jobs = [world.submit(job(5, 20, seed=s)) for s in range(3)]
    world.run(until=0.01)
    world.scheduler.close()
    world.scheduler.close()
    assert all(isinstance(r.error, Unavailable) for r in jobs)
    with pytest.raises(Unavailable):
        world.submit(job())
    world.run()  # the wave in flight completes and is ignored
    world.check_all_free()


def real_time(wave_s: float = 0.0) -> Scheduler:
    limits = SchedLimits(
        max_seqs=2, max_queue=8, wave_columns=48, wave_target_ms=50.0, decode_gap_ms=250.0,
        queue_timeout_s=0.0, request_timeout_s=0.0, context=256,
    )  # fmt: skip
    return Scheduler(FakeEngine(SIZES, wave_s=wave_s), limits, Metrics())


async def test_before_start_jobs_are_refused() -> None:
    scheduler = real_time()
    with pytest.raises(Unavailable):
        scheduler.submit(job(), Recorder())


async def test_drain_lets_live_ones_finish() -> None:
    scheduler = real_time()
    scheduler.start()
    got = [Recorder() for _ in range(4)]
    for seed, recorder in enumerate(got):
        scheduler.submit(job(5, 20, seed=seed), recorder)
    drained = asyncio.create_task(scheduler.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        scheduler.submit(job(), Recorder())
    await drained
    assert [r.reason for r in got] == [FinishReason.LENGTH] * 4
    assert scheduler.idle
    await scheduler.drain(60)


async def test_drain_ends_what_does_not_finish() -> None:
    scheduler = real_time(wave_s=0.01)
    scheduler.start()
    got = [Recorder() for _ in range(3)]
    for seed, recorder in enumerate(got):
        scheduler.submit(job(5, 200, seed=seed), recorder)
    await scheduler.drain(0.05)
    assert all(isinstance(r.error, Unavailable) for r in got)
    assert scheduler.idle
    scheduler.check()


def test_unused_memory_goes_back_when_nothing_ran_for_a_while() -> None:
    world = World(limits={"idle_return_s": 10.0})
    state = world.engine.state
    world.submit(job(40, 5))
    world.run(until=9.0)
    assert state.dropped == 0
    world.submit(job(20, 3, seed=1))  # the wait begins again
    world.run(until=18.0)
    assert state.dropped == 0
    world.run(until=20.0)
    assert state.dropped == 4, "one slab, and the three blocks of the longer one"
    world.run(until=100.0)
    assert state.dropped == 4, "what was not used since is left alone"
    got = world.submit(job(40, 5))
    world.run()
    assert got.ids == alone(job(40, 5)).ids
    assert state.dropped == 8
    world.check_all_free()


def test_a_refused_return_is_tried_after_the_next_pause() -> None:
    world = World(limits={"idle_return_s": 1.0})
    world.submit(job(5, 1))
    world.run(until=0.5)
    world.faults.refuse.add(world.engine._submits + 1)
    world.run(until=2.0)
    assert (world.engine.state.dropped, world.fatal) == (0, [])
    world.submit(job(5, 1))
    world.run()
    assert world.engine.state.dropped == 2
