"""Speculation in virtual time: whatever is drafted, everybody hears what plain decode gives, all
memory is accounted for after every callback, and what keeps failing is given up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.fakemodel import HashModel, Slot, Timeline
from kslserve.engine.types import RowKind, Wave
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job
from kslserve.sched.spec.cost import PACE_MIN, PROBE
from kslserve.sched.spec.drafter import Drafter
from kslserve.sched.spec.ladder import DraftStats
from kslserve.sched.spec.policy import SpecPolicy
from tests.world import SIZES, Recorder, World, job

ALWAYS = SpecPolicy(always=True)
POLICIES = [
    SpecPolicy(mtp=False),
    SpecPolicy(ngram=False),
    SpecPolicy(),
    SpecPolicy(mtp=False, lanes=3, always=True),
    SpecPolicy(ngram=False, depth=1, always=True),
    SpecPolicy(ngram=False, depth=16, lanes=16, always=True),
    replace(ALWAYS, lanes=5, depth=2),
    ALWAYS,
]


class Echo:
    """Repeats what came `period` tokens before, but for one token in `every`."""

    def __init__(self, period: int, every: int) -> None:
        self._period = period
        self._every = every
        self._dice = HashModel(512)

    def token(self, slot: Slot, timeline: Timeline) -> int:
        if len(timeline.tokens) < self._period or timeline.chain[-1] % self._every == 0:
            return self._dice.token(slot, timeline)
        return timeline.tokens[-self._period]

    def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
        return self._dice.top(timeline, token, n)


def world_of(policy: SpecPolicy | None, model: Any, **limits: Any) -> World:
    return World(
        replace(SIZES, wave_columns=128),
        limits={"spec": policy, **limits},
        options={"model": model, "has_mtp": True},
    )


def run_one(new: Job, policy: SpecPolicy | None, model: Any) -> Recorder:
    world = world_of(policy, model)
    recorder = world.submit(new)
    world.run()
    world.check_all_free()
    return recorder


def stats_of(recorder: Recorder) -> DraftStats:
    assert recorder.sequence is not None
    assert recorder.sequence.drafter is not None
    return recorder.sequence.drafter.stats


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(POLICIES),
    model=st.sampled_from([HashModel(512), HashModel(3), Echo(7, 5), Echo(20, 1000)]),
    count=st.integers(1, 6),
    stops=st.sampled_from([(), (1,), tuple(range(32))]),
)
def test_everybody_hears_what_plain_decode_gives(
    seed: int, policy: SpecPolicy, model: Any, count: int, stops: tuple[int, ...]
) -> None:
    rng = random.Random(seed)
    jobs = [
        job(
            rng.choice([1, 5, 16, 17, rng.randrange(1, 120)]),
            rng.choice([1, 2, 3, rng.randrange(1, 100)]),
            seed=seed + i,
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]), logprobs=rng.choice([None, 2])
            ),
            stop_ids=stops,
        )
        for i in range(count)
    ]
    world = world_of(policy, model, wave_columns=rng.choice([16, 48]), cache=CachePolicy())
    got = [world.submit(new) for new in jobs]
    world.run()
    world.check_all_free()
    for new, recorder in zip(jobs, got, strict=True):
        expected = run_one(new, None, model)
        assert recorder.ids == expected.ids
        assert recorder.reason is expected.reason
        assert recorder.logprobs == expected.logprobs
    if policy.always and count == 1 and len(got[0].ids) > 30:
        assert stats_of(got[0]).drafted > 0


@pytest.mark.parametrize("seed", range(8))
def test_random_load_with_drafts(seed: int) -> None:
    """Cancellations, refused waves and little memory beside drafts."""
    rng = random.Random(700 + seed)
    sizes = replace(SIZES, blocks=rng.choice([20, 40]), wave_columns=128)
    policy = rng.choice([SpecPolicy(), ALWAYS])
    model = rng.choice([Echo(9, 6), HashModel(512)])
    world = World(
        sizes,
        limits={"spec": policy, "max_queue": 64, "cache": CachePolicy()},
        options={"model": model, "has_mtp": True},
    )
    world.faults.refuse = {rng.randrange(1, 300) for _ in range(rng.choice([0, 8]))}
    recorders: list[tuple[Job, Recorder]] = []
    cancelled: set[int] = set()

    def arrive(new: Job) -> None:
        recorder = world.submit(new)
        recorders.append((new, recorder))
        if rng.random() < 0.3:
            world.clock.call_later(rng.uniform(0, 0.3), lambda: cancel(new.seed, recorder))

    def cancel(number: int, recorder: Recorder) -> None:
        cancelled.add(number)
        world.cancel(recorder)

    for i in range(30):
        new = job(
            rng.randrange(1, 100), rng.randrange(1, 80), seed=i, priority=rng.choice([0, 0, 1])
        )
        world.clock.call_later(rng.uniform(0, 1.0), lambda new=new: arrive(new))
    world.run()
    world.check_all_free()
    for new, recorder in recorders:
        expected = run_one(new, None, model)
        if recorder.reason is FinishReason.CANCELLED:
            assert new.seed in cancelled or recorder.error is not None
            assert recorder.ids == expected.ids[: len(recorder.ids)]
        else:
            assert recorder.ids == expected.ids


def test_a_repetitive_text_takes_few_waves() -> None:
    new = job(60, 150)
    plain, spec = (run_one(new, policy, Echo(20, 10**6)) for policy in (None, SpecPolicy()))
    assert spec.ids == plain.ids
    assert len(plain.batches) == 150
    assert len(spec.batches) < 40
    assert stats_of(spec).ngram_accepted > 100


def test_a_text_that_cannot_be_foreseen_is_left_alone() -> None:
    """No wave is planned for the sake of drafts, or of new blocks, and few are looked at."""
    world = world_of(SpecPolicy(mtp=False), HashModel(512))
    speculator = world.scheduler._outgoing.speculator
    assert speculator is not None
    calls = {"look": 0, "draft": 0, "plan": 0}

    def spy(name: str) -> None:
        work = getattr(speculator, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return work(*arguments)

        setattr(speculator, name, counted)

    for name in calls:
        spy(name)
    got = world.submit(job(5, 220))
    world.run()
    assert len(got.batches) == 220
    assert calls["plan"] == 2  # the prompt's wave, and the first one behind it
    # The engine waits for the probe's looks; later ones are taken while a wave runs.
    assert calls["draft"] <= PROBE + 1
    assert 3 < calls["look"] <= 4 + 220 // PACE_MIN


def test_nothing_is_drafted_behind_a_prompt_while_it_may_cost_nothing() -> None:
    world = world_of(SpecPolicy(), HashModel(512))
    speculator = world.scheduler._outgoing.speculator
    assert speculator is not None
    proposed = 0
    submit = world.engine.submit

    def spy(wave: Wave) -> bool:
        nonlocal proposed
        proposed += sum(row.propose for row in wave.rows)
        return submit(wave)

    world.engine.submit = spy  # type: ignore[method-assign]
    world.submit(job(60, 60))
    world.run()
    assert proposed > 0
    proposed = 0
    speculator._allowance.settle(1, -100.0)
    got = world.submit(job(60, 60))
    world.run()
    world.check_all_free()
    assert proposed == 0
    assert len(got.batches) == 60


def test_drafts_resume_where_a_text_begins_to_repeat_itself() -> None:
    """Though nobody looked for long."""

    class Turns:
        def __init__(self) -> None:
            self._dice, self._echo = HashModel(512), Echo(20, 10**6)

        def token(self, slot: Slot, timeline: Timeline) -> int:
            model = self._dice if len(timeline.tokens) < 100 else self._echo
            return model.token(slot, timeline)

        def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
            return self._dice.top(timeline, token, n)

    got = run_one(job(5, 240), SpecPolicy(mtp=False), Turns())
    assert len(got.batches) < 220
    assert stats_of(got).ngram_accepted > 20


def test_mtp_drafts_are_used_where_they_are_good() -> None:
    """The fake's come true three times in four."""
    got = run_one(job(5, 200), SpecPolicy(ngram=False), HashModel(512))
    stats = stats_of(got)
    assert len(got.batches) < 135
    assert stats.mtp_accepted > 65
    assert stats.ngram == 0


def test_both_kinds_in_one_row() -> None:
    """What MTP drafts is continued from the history."""
    world = world_of(ALWAYS, Echo(30, 4))
    lanes: list[tuple[int, int]] = []
    submit = world.engine.submit

    def spy(wave: Wave) -> bool:
        for row in wave.rows:
            if row.kind is RowKind.VERIFY:
                drafter = got.sequence.drafter if got.sequence else None
                assert drafter is not None
                lanes.append((drafter.own, len(drafter.lanes) - drafter.own))
        return submit(wave)

    world.engine.submit = spy  # type: ignore[method-assign]
    got = world.submit(job(60, 150))
    world.run()
    assert any(own and more for own, more in lanes)
    assert got.ids == run_one(job(60, 150), None, Echo(30, 4)).ids


def garbage(world: World) -> None:
    """Have every MTP draft be wrong."""
    state = world.engine.state
    propose = state._propose

    def wrong(*arguments: Any) -> list[int]:
        return [(token + 1 + token % 2) % 512 for token in propose(*arguments)]

    state._propose = wrong  # type: ignore[method-assign]


def test_what_never_comes_true_is_given_up() -> None:
    """The ladder: shorter chains, then plain decode; the events tell."""
    world = world_of(replace(ALWAYS, ngram=False), HashModel(512))
    garbage(world)
    got = world.submit(job(5, 200))
    world.run()
    stats = stats_of(got)
    assert got.ids == run_one(job(5, 200), None, HashModel(512)).ids
    assert [depth for _, depth, _ in stats.events] == [5, 2, 1, 0]
    assert {why for _, _, why in stats.events} == {"low acceptance"}
    text = world.metrics.render()
    assert 'speculation_events_total{kind="step_down"} 3' in text
    assert 'speculation_events_total{kind="plain"} 1' in text
    assert stats.mtp_accepted == 0
    # The next one starts at the top.
    again = world.submit(job(5, 3, seed=1))
    world.run()
    assert again.sequence is not None
    assert again.sequence.drafter is not None
    assert again.sequence.drafter.ladder.depth == 15


def test_garbage_is_hardly_drafted_where_cost_counts() -> None:
    """Probes end after a few; the plan never asks for what does not pay."""
    world = world_of(SpecPolicy(ngram=False), HashModel(512))
    garbage(world)
    got = world.submit(job(5, 230))
    world.run()
    assert got.ids == run_one(job(5, 230), None, HashModel(512)).ids
    assert stats_of(got).mtp < 40


def test_a_draft_head_that_fails_ends_drafts_and_nothing_else() -> None:
    world = world_of(replace(ALWAYS, ngram=False), HashModel(512))
    state = world.engine.state
    row_of = state._row

    def fail(row: Any) -> Any:
        done = row_of(row)
        if row.propose and done.position > 20:
            done.drafts, done.bad_draft = (), True
        return done

    state._row = fail  # type: ignore[method-assign]
    got = world.submit(job(5, 60))
    world.run()
    world.check_all_free()
    assert got.ids == run_one(job(5, 60), None, HashModel(512)).ids
    assert [why for _, _, why in stats_of(got).events] == ["the draft head failed"]


def test_a_refused_wave_with_drafts_is_tried_again_without() -> None:
    world = world_of(ALWAYS, Echo(9, 6))
    world.faults.refuse = {12}
    got = world.submit(job(30, 60))
    world.run()
    world.check_all_free()
    assert got.error is None
    assert got.ids == run_one(job(30, 60), None, Echo(9, 6)).ids
    assert [why for _, _, why in stats_of(got).events] == ["the engine refused the wave"]


def test_nothing_is_drafted_beside_many_rows_that_cost() -> None:
    """Where a column costs as much as a row, drafts that come true three times in four lose."""
    world = World(
        replace(SIZES, wave_columns=128),
        limits={"spec": SpecPolicy(ngram=False)},
        options={"has_mtp": True, "wave_s": 0.0, "column_s": 0.005},
    )
    got = [world.submit(job(5, 80, seed=i)) for i in range(4)]
    world.run()
    for recorder in got:
        stats = stats_of(recorder)
        assert stats.drafted < 20


def test_where_no_draft_can_pay_nobody_is_looked_at() -> None:
    """Beside others, columns cost more than they can give; who is left alone drafts again."""
    world = World(
        replace(SIZES, wave_columns=128),
        limits={"spec": SpecPolicy(mtp=False)},
        options={"has_mtp": True, "wave_s": 0.001, "column_s": 0.0001, "model": Echo(20, 10**6)},
    )
    speculator = world.scheduler._outgoing.speculator
    assert speculator is not None
    for rows in (2, 3):
        costs = speculator.costs.of(rows)
        for _ in range(5):
            costs.plain(1.0, 1)
        for columns in range(rows + 1, 64):
            for _ in range(5):
                costs.observe(columns, 1.0 + columns, 1)
        assert costs.known
    reads = 0
    read = Drafter.read

    def spy(self: Drafter, sequence: Any) -> None:
        nonlocal reads
        reads += len(world.scheduler._roster.running) > 1
        read(self, sequence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "read", spy)
        got = [world.submit(job(60, n, seed=i)) for i, n in enumerate((60, 60, 150))]
        world.run()
    assert [stats_of(recorder).drafted for recorder in got[:2]] == [0, 0]
    assert reads < 15
    assert stats_of(got[2]).accepted > 40


def test_a_guided_sequence_never_drafts() -> None:
    class Free:
        ready, mask, version = True, None, 0

        def advance(self, ids: Any) -> list[int]:
            return []

        def wait(self, timeout_s: float) -> bool:
            return True

        def when_ready(self, callback: Any) -> None:
            raise AssertionError

    world = world_of(ALWAYS, Echo(9, 10**6))
    got = world.submit(job(30, 40, guide=Free()))
    world.run()
    assert got.sequence is not None
    assert got.sequence.drafter is None
    assert len(got.batches) == 40


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_drafts_that_come_true_as_often_as_wanted(rate: float) -> None:
    """The hook of the bench: the output is forced, MTP's drafts are replaced."""
    forced = np.random.default_rng(3).integers(0, 512, 230, dtype=np.int32)
    policy = SpecPolicy(ngram=False, depth=4, lanes=4, always=True, oracle=rate)
    got = run_one(job(5, 230, forced=forced), policy, HashModel(512))
    assert got.ids == forced.tolist()
    stats = stats_of(got)
    if rate in (0.0, 1.0):
        assert stats.mtp > 20
        assert stats.mtp_accepted == rate * stats.mtp
    else:
        # Of a chain of 4, so many are right before the first wrong one.
        expected = sum(rate**i for i in range(1, 5)) / 4
        assert abs(stats.mtp_accepted / stats.mtp - expected) < 0.15


def test_metrics_count_rounds_and_drafts() -> None:
    world = world_of(ALWAYS, HashModel(512))
    got = world.submit(job(20, 120, seed=3))
    world.run()
    stats = stats_of(got)
    drafts = world.metrics.labelled("speculative_tokens_total", "", "")
    assert (drafts["drafted"].value, drafts["committed"].value) == (stats.drafted, stats.accepted)
    rounds = world.metrics.counter("speculative_rounds_total", "").value
    assert 0 < rounds <= stats.drafted
    assert rounds + stats.accepted <= len(got.ids)
