"""Speculation on the native engine: at any setting, in any company, everybody gets the tokens of
plain decode, and checkpoints of their prefixes hold what plain decode leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.ksl.open import open_model
from kslserve.metrics import Metrics
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from kslserve.sched.spec.policy import SpecPolicy
from tests.native.golden import NAMES, golden_model
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors
from tests.world import Recorder

POOLS = PoolSizes(
    slots=4, slabs=12, blocks=60, block_tokens=16, blocks_per_slot=10, wave_columns=120
)
LIMITS = SchedLimits(4, 32, 24, 50.0, 250.0, 0.0, 0.0, 160, CachePolicy())
POLICIES = [
    SpecPolicy(),
    SpecPolicy(mtp=False, always=True),
    SpecPolicy(ngram=False, depth=1, always=True),
    SpecPolicy(ngram=False, depth=5, lanes=5, always=True),
    SpecPolicy(ngram=False, depth=16, lanes=16, always=True),
    SpecPolicy(depth=3, lanes=15, always=True),
]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=0.6, logit_bias=((7, 8.0), (9, 8.0))),
    # A few ids take turns: n-gram drafts come true.
    SamplingParams(temperature=0.4, logit_bias=tuple((i, 30.0) for i in range(3))),
]


@cache
def tiny() -> tuple[ModelSpec, list[TensorArg]]:
    spec = tiny_spec()
    return spec, tiny_tensors(spec, tiny_arrays(spec, seed=3), "mixed")


async def run(
    model: tuple[ModelSpec, list[TensorArg]],
    todo: list[Job],
    policy: SpecPolicy | None,
    hooks: dict[int, int] | None = None,
    **options: Any,
) -> list[Recorder]:
    """What the jobs hear. hooks: jobs that are cancelled when they have heard so many tokens."""
    engine = NativeEngine.open(*model, POOLS, kv_format="bf16", threads=1, **options)
    scheduler = Scheduler(engine, replace(LIMITS, spec=policy), Metrics())
    scheduler.start()
    recorders = []
    for number, one in enumerate(todo):
        limit = (hooks or {}).get(number)

        def stop(event: str, recorder: Recorder, limit: int | None = limit) -> None:
            if limit is not None and len(recorder.ids) >= limit and recorder.sequence is not None:
                scheduler.cancel(recorder.sequence)

        recorder = Recorder(stop)
        recorders.append(recorder)
        recorder.sequence = scheduler.submit(one, recorder)
    await scheduler.drain(120)
    scheduler.check()
    snapshot = scheduler.snapshot()
    assert snapshot.blocks_free == snapshot.blocks_total
    engine.close()
    return recorders


def jobs_of(seed: int, samplings: list[SamplingParams], stop: tuple[int, ...]) -> list[Job]:
    rng = np.random.default_rng(seed)
    jobs = []
    for number, sampling in enumerate(samplings):
        prompt = rng.integers(0, 190, rng.choice([1, 5, 20, 60]), dtype=np.int32)
        if rng.random() < 0.5:
            prompt = np.tile(prompt, 4)[:60]
        new = int(rng.choice([1, 2, 3, 17, 40]))
        jobs.append(Job(prompt, new, sampling, seed + number, stop))
    return jobs


def drafted(recorder: Recorder) -> int:
    assert recorder.sequence is not None
    drafter = recorder.sequence.drafter
    return drafter.stats.drafted if drafter is not None else 0


def check_same(got: list[Recorder], expected: list[Recorder], cut: dict[int, int]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if number in cut:
            shown = min(len(one.ids), len(other.ids))
            assert one.ids[:shown] == other.ids[:shown]
            continue
        assert one.ids == other.ids
        assert one.reason is other.reason
        assert one.logprobs == other.logprobs


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(POLICIES),
    samplings=st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=5),
    stop=st.sampled_from([(), (0,), (7, 9), tuple(range(0, 190, 12))]),
    cut=st.dictionaries(st.integers(0, 4), st.integers(1, 20), max_size=1),
)
async def test_tokens_are_those_of_plain_decode(
    seed: int,
    policy: SpecPolicy,
    samplings: list[SamplingParams],
    stop: tuple[int, ...],
    cut: dict[int, int],
) -> None:
    jobs = jobs_of(seed, samplings, stop)
    plain = await run(tiny(), jobs, None, cut)
    check_same(await run(tiny(), jobs, policy, cut), plain, cut)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
async def test_drafts_are_made_and_come_true(policy: SpecPolicy) -> None:
    """What the test above compares is not plain decode twice."""
    jobs = jobs_of(3, [SAMPLINGS[5], SAMPLINGS[5]], ())
    jobs = [replace(one, max_new_tokens=60) for one in jobs]
    got = await run(tiny(), jobs, policy)
    assert all(drafted(one) > 5 for one in got)
    assert any(len(one.batches) < len(one.ids) for one in got)


async def test_checkpoints_hold_no_rejected_draft() -> None:
    """A second turn adopts the end of a first one that was sampled with drafts, wrong ones
    included: it goes on as from a cold prefill."""
    (first,) = jobs_of(11, [SAMPLINGS[2]], ())
    first = replace(first, max_new_tokens=40)
    policy = SpecPolicy(ngram=False, depth=6, always=True)
    engine = NativeEngine.open(*tiny(), POOLS, kv_format="bf16", threads=1)
    scheduler = Scheduler(engine, replace(LIMITS, spec=policy), Metrics())
    scheduler.start()

    async def ask(job: Job) -> Recorder:
        recorder = Recorder()
        recorder.sequence = scheduler.submit(job, recorder)
        while recorder.reason is None:
            await scheduler._wait_idle()
        return recorder

    one = await ask(first)
    assert one.sequence is not None
    assert one.sequence.drafter is not None
    stats = one.sequence.drafter.stats
    assert stats.mtp > stats.mtp_accepted
    turn = np.concatenate([first.prompt_ids, np.array([*one.ids, 5, 6, 7], np.int32)])
    for sampling in SAMPLINGS:
        second = Job(turn, 20, sampling, 4)
        warm = await ask(second)
        assert warm.cached_tokens >= len(turn) - 4
        (cold,) = await run(tiny(), [second], None)
        assert (warm.ids, warm.logprobs) == (cold.ids, cold.logprobs)
    engine.close()


async def test_a_draft_head_that_fails_ends_drafts_only() -> None:
    """NaN in the weights of the MTP head: everything is answered, plainly."""
    spec = tiny_spec()
    arrays = tiny_arrays(spec, seed=3)
    good = spec, tiny_tensors(spec, arrays, "f32")
    arrays["mtp.norm.weight"] = np.full_like(arrays["mtp.norm.weight"], np.nan)
    bad = spec, tiny_tensors(spec, arrays, "f32")
    jobs = jobs_of(5, SAMPLINGS[:4], ())
    expected = await run(good, jobs, None)
    got = await run(bad, jobs, SpecPolicy(ngram=False, always=True))
    check_same(got, expected, {})
    for one in got:
        assert one.sequence is not None
        assert one.sequence.drafter is not None
        if len(one.ids) > 3:
            events = one.sequence.drafter.stats.events
            assert [why for _, _, why in events] == ["the draft head failed"]


@pytest.fixture(scope="module")
def nano() -> Iterator[tuple[ModelSpec, list[TensorArg]]]:
    with open_model("ksl-nano") as model:
        yield model.spec, list(model.tensors)


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[3]])
async def test_the_bundled_model(
    nano: tuple[ModelSpec, list[TensorArg]], sampling: SamplingParams
) -> None:
    """A trained head, a repetitive prompt, two streams: drafts of both kinds come true."""
    ids = np.random.default_rng(0).integers(300, 4000, 12, dtype=np.int32)
    jobs = [Job(np.tile(ids, 6), 60, sampling, 1), Job(np.tile(ids[:5], 9), 40, sampling, 2)]
    plain = await run(nano, jobs, None)
    for policy in (SpecPolicy(), SpecPolicy(always=True)):
        got = await run(nano, jobs, policy, draft_margin=0.5)
        check_same(got, plain, {})
        assert {one.reason for one in got} <= {FinishReason.LENGTH}
    assert sum(map(drafted, got)) > 20


@cache
def golden(name: str) -> tuple[ModelSpec, list[TensorArg]]:
    return golden_model(name)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(POLICIES[1:]),
    samplings=st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=3),
)
async def test_the_golden_models(
    name: str, seed: int, policy: SpecPolicy, samplings: list[SamplingParams]
) -> None:
    """Tied and untied heads, bf16 and FP8 weights; their drafts are hardly better than garbage."""
    jobs = jobs_of(seed, samplings, (7,))
    plain = await run(golden(name), jobs, None)
    check_same(await run(golden(name), jobs, policy), plain, {})
