"""The scheduler on the native engine: what a job gives does not depend on its neighbours."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import CPU_LIBRARY, NativeEngine
from kslserve.errors import EngineError
from kslserve.metrics import Metrics
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors
from tests.world import Recorder

POOLS = PoolSizes(
    slots=3, slabs=3, blocks=18, block_tokens=16, blocks_per_slot=8, wave_columns=32, ring_depth=1
)
LIMITS = SchedLimits(3, 16, 24, 50.0, 250.0, 0.0, 0.0, 128)
Model = tuple[ModelSpec, list[TensorArg], Any]  # with the library


def model_of(library: Any) -> Model:
    spec = tiny_spec()
    return spec, tiny_tensors(spec, tiny_arrays(spec, seed=3), "mixed"), library


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(CPU_LIBRARY)


def jobs() -> list[Job]:
    samplings = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=1.2, min_p=0.05, logit_bias=((7, 3.0),)),
        SamplingParams(temperature=1.0, seed=4),
    ]
    rng = np.random.default_rng(1)
    return [
        Job(rng.integers(0, 190, n, dtype=np.int32), new, sampling, seed, stop_ids)
        for seed, (n, new, sampling, stop_ids) in enumerate(
            zip([5, 70, 17, 33, 1], [30, 10, 25, 40, 20], samplings, [(), (), (9,), (), (3, 4)],
                strict=True)
        )
    ]  # fmt: skip


class Counting:
    """A library that counts the calls of each function."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._library, name)


async def run(model: Model, todo: list[Job], ahead: bool = False) -> list[Recorder]:
    pools = replace(POOLS, ring_depth=2) if ahead else POOLS
    spec, tensors, library = model
    engine = NativeEngine.open(spec, tensors, pools, kv_format="bf16", threads=1, library=library)
    scheduler = Scheduler(engine, replace(LIMITS, submit_ahead=ahead), Metrics())
    scheduler.start()
    recorders = [Recorder() for _ in todo]
    for one, recorder in zip(todo, recorders, strict=True):
        recorder.sequence = scheduler.submit(one, recorder)
    await scheduler.drain(120)
    scheduler.check()
    snapshot = scheduler.snapshot()
    assert snapshot.blocks_free == snapshot.blocks_total
    engine.close()
    return recorders


async def test_together_equals_alone(model: Model) -> None:
    together = await run(model, jobs())
    for one, got in zip(jobs(), together, strict=True):
        (expected,) = await run(model, [one])
        assert got.ids == expected.ids
        assert got.logprobs == expected.logprobs
        assert got.reason is expected.reason
    assert {r.reason for r in together} <= {FinishReason.LENGTH, FinishReason.STOP}


async def test_depth_two_equals_depth_one(model: Model) -> None:
    """Tokens that the host never saw before they were used, stop ids in the middle included."""
    (free,) = await run(model, [jobs()[0]])
    stopping = replace(jobs()[0], stop_ids=(free.ids[9],))
    todo = [*jobs(), stopping]
    one, two = await run(model, todo), await run(model, todo, ahead=True)
    for got, expected in zip(two, one, strict=True):
        assert got.ids == expected.ids
        assert got.logprobs == expected.logprobs
        assert got.reason is expected.reason
    assert two[-1].reason is FinishReason.STOP


async def test_what_the_engine_refuses_ends_one_job(
    model: Model,
) -> None:
    """Forced ids need test hooks; the others, new in the same wave, do not suffer."""
    bad = replace(jobs()[1], forced=np.array([1], dtype=np.int32))
    first, refused, last = await run(model, [jobs()[0], bad, jobs()[2]])
    assert isinstance(refused.error, EngineError)
    assert "test_hooks" in str(refused.error)
    assert refused.admitted_count == 0
    assert first.reason is FinishReason.LENGTH
    assert last.error is None


async def test_a_wave_is_two_calls_of_the_library(model: Model) -> None:
    """Whatever the number of sequences: one that submits it and one that reads its results."""
    engine = NativeEngine.open(*model[:2], POOLS, kv_format="bf16", threads=1)
    library = Counting(engine._lib)
    engine._lib = library
    metrics = Metrics()
    scheduler = Scheduler(engine, LIMITS, metrics)
    scheduler.start()
    for one in jobs()[:3]:
        scheduler.submit(one, Recorder())
    await scheduler.drain(120)
    waves = metrics.counter("waves_total", "").value
    assert waves >= 25
    assert library.calls["ksl_submit"] == waves
    assert library.calls["ksl_poll"] <= waves
    assert library.calls.keys() <= {"ksl_submit", "ksl_poll", "ksl_event_fd"}
    scheduler.close()
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by /proc")
def test_threads_are_nice_and_sleep_when_nothing_runs(model: Model) -> None:
    """All of the engine's, and nobody else."""

    def threads() -> dict[str, list[str]]:
        """Fields behind the name of each thread's stat line, from the state on."""
        found = {}
        for task in Path("/proc/self/task").iterdir():
            found[task.name] = (task / "stat").read_text().rpartition(")")[2].split()
        return found

    before = threads()
    engine = NativeEngine.open(*model[:2], POOLS, kv_format="bf16", threads=3, nice=7)
    try:
        for _ in range(500):
            ours = {k: v for k, v in threads().items() if k not in before}
            if len(ours) == 3 and all((v[0], v[16]) == ("S", "7") for v in ours.values()):
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"after 5 s: {ours}")
        assert {k: v[16] for k, v in threads().items() if k in before} == {
            k: v[16] for k, v in before.items()
        }
    finally:
        engine.close()
