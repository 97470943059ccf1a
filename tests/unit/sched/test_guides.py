"""Sequences under a guide: masks reach the engine, late ones hold up nobody else, forced ids are
computed and told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.sched.cache.saves import CachePolicy
from tests.world import Recorder, World, alone, job

VOCAB = 512


def only(ids: range) -> np.ndarray:
    mask = np.zeros(VOCAB // 32, np.uint32)
    for token in ids:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask


class Script:
    """A guide in virtual time. masks: of the n-th output id, None for no mask. late_s: how long a
    mask takes to make. forced: {n: ids that follow the n-th id}."""

    def __init__(
        self,
        world: World,
        masks: Callable[[int], np.ndarray | None],
        late_s: float = 0.0,
        forced: dict[int, list[int]] | None = None,
    ) -> None:
        self.world, self.masks, self.late_s = world, masks, late_s
        self.forced = forced or {}
        self.seen: list[int] = []
        self.waits = 0
        self.callback: Callable[[], None] | None = None
        self.mask: np.ndarray | None = None
        self.version = 0
        self.ready = False
        self.make()

    def make(self) -> None:
        found = self.masks(len(self.seen))
        if found is not self.mask:
            self.mask = found
            self.version += 1
        self.ready = True
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()

    def advance(self, ids: Sequence[int]) -> list[int]:
        assert self.ready
        self.seen += ids
        forced = self.forced.get(len(self.seen), [])
        self.seen += forced
        if self.late_s:
            self.ready = False
            self.world.clock.call_later(self.late_s, self.make)
        else:
            self.make()
        return list(forced)

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        return self.ready

    def when_ready(self, callback: Callable[[], None]) -> None:
        assert not self.ready
        self.callback = callback


LOW, HIGH = only(range(40)), only(range(400, 440))


def by_turns(n: int) -> np.ndarray | None:
    return (LOW, HIGH, None)[n % 3]


def check_turns(ids: list[int]) -> None:
    assert all(token < 40 for token in ids[0::3]), ids
    assert all(400 <= token < 440 for token in ids[1::3]), ids


@pytest.mark.parametrize("late_s", [0.0, 0.0004, 0.012])
def test_masks_hold_for_their_position_alone(late_s: float) -> None:
    world = World()
    guide = Script(world, by_turns, late_s)
    held = world.submit(job(20, 12, seed=1, guide=guide))
    free = world.submit(job(9, 30, seed=2))
    world.run()
    check_turns(held.ids)
    assert len(held.ids) == 12
    assert guide.seen == held.ids[:-1], "the last id ends the sequence"
    assert free.ids == alone(job(9, 30, seed=2)).ids
    world.check_all_free()


def test_the_same_mask_is_sent_once() -> None:
    world = World()
    ops: list[int] = []
    submit = world.engine.submit

    def counting(wave: object) -> bool:
        ops.append(len([op for op in wave.before if op.kind.name == "MASK"]))  # type: ignore[attr-defined]
        return submit(wave)  # type: ignore[arg-type]

    world.engine.submit = counting  # type: ignore[method-assign]
    held = world.submit(job(4, 10, guide=Script(world, lambda n: LOW)))
    world.run()
    assert sum(ops) == 1
    assert all(token < 40 for token in held.ids)


def test_no_mask_costs_no_op_and_no_plan() -> None:
    """A guide that only watches changes nothing."""
    world = World()
    held = world.submit(job(4, 10, seed=3, guide=Script(world, lambda n: None)))
    world.run()
    assert held.ids == alone(job(4, 10, seed=3)).ids


def test_a_late_mask_holds_up_nobody_else() -> None:
    world = World(options={"wave_s": 0.010, "column_s": 0.0})
    held = world.submit(job(4, 6, seed=1, guide=Script(world, by_turns, 0.015)))
    free = world.submit(job(4, 200, seed=2))
    while not held.reason:
        assert world.clock.step()
        world.scheduler.check()
    # While one id of the slow one is made, the other has every wave.
    assert len(free.ids) >= 2 * len(held.ids)
    world.run()
    check_turns(held.ids)
    assert free.ids == alone(job(4, 200, seed=2)).ids
    world.check_all_free()


def test_with_nothing_else_to_do_the_engine_waits_for_the_mask() -> None:
    world = World()
    held = world.submit(job(4, 5, guide=Script(world, by_turns, 0.5)))
    world.run()
    check_turns(held.ids)
    assert 2.0 < world.clock.now() < 2.5, "four masks of half a second"
    assert world.scheduler.snapshot().waves == 5


def test_cancelled_while_it_waits_for_its_mask() -> None:
    world = World()
    held = world.submit(job(4, 50, guide=Script(world, by_turns, 0.5)))
    world.run(until=0.2)
    assert len(held.ids) == 1
    world.cancel(held)
    world.run()
    assert held.reason is FinishReason.CANCELLED
    world.check_all_free()


@pytest.mark.parametrize("late_s", [0.0, 0.012])
@pytest.mark.parametrize("columns", [2, 48])
def test_forced_ids_are_told_computed_and_counted(late_s: float, columns: int) -> None:
    forced = [7, 8, 9, 10, 11]
    world = World(limits={"wave_columns": columns})
    guide = Script(world, lambda n: None, late_s, {3: forced})
    held = world.submit(job(20, 14, seed=4, guide=guide))
    other = world.submit(job(9, 40, seed=2))
    world.run()
    assert held.ids[3:8] == forced
    assert len(held.ids) == 14
    assert held.reason is FinishReason.LENGTH
    assert other.ids == alone(job(9, 40, seed=2)).ids
    # What follows is what the engine samples after exactly these ids.
    again = job(20, 9, seed=4)
    again.prompt_ids = np.concatenate([again.prompt_ids, np.array(held.ids[:8], np.int32)])
    again.max_new_tokens = 6
    assert alone(again).ids == held.ids[8:]
    world.check_all_free()


def test_forced_ids_come_with_log_probabilities() -> None:
    world = World()
    guide = Script(world, lambda n: None, forced={2: [5, 6]})
    held = world.submit(job(4, 6, guide=guide, sampling=SamplingParams(logprobs=1)))
    world.run()
    assert [entry[0][0] for entry in held.logprobs] == held.ids
    assert held.logprobs[2:4] == [[(5, 0.0)], [(6, 0.0)]]


def test_forced_ids_that_do_not_fit_end_the_sequence() -> None:
    world = World()
    held = world.submit(job(4, 6, guide=Script(world, lambda n: None, forced={4: [1, 2]})))
    world.run()
    assert len(held.ids) == 4
    assert held.reason is FinishReason.LENGTH
    world.check_all_free()


def test_a_refused_wave_sends_its_masks_again() -> None:
    world = World()
    world.faults.refuse = {1}
    heard: list[Recorder] = []
    for seed in range(3):
        heard.append(world.submit(job(4, 7, seed=seed, guide=Script(world, by_turns))))
    world.run()
    for held in heard:
        check_turns(held.ids)
        assert len(held.ids) == 7
    world.check_all_free()


@pytest.mark.parametrize("late_s", [0.0, 0.012])
def test_a_sequence_that_gave_way_goes_on_under_its_mask(late_s: float) -> None:
    policy = CachePolicy(min_tokens=4, gap=4, interval=32)
    world = World(limits={"max_seqs": 1, "cache": policy})
    low = job(20, 60, seed=1, priority=1)
    low.guide = Script(world, by_turns, late_s, {6: [0, 400, 7]})
    held = world.submit(low)
    world.run(until=0.15)
    assert 9 < len(held.ids) < 60
    other = world.submit(job(9, 5, seed=2))
    world.run()
    assert world.scheduler.snapshot().preemptions == 1
    assert other.ids == alone(job(9, 5, seed=2)).ids
    check_turns(held.ids)
    assert len(held.ids) == 60
    assert held.ids[6:9] == [0, 400, 7]
    plain = World()
    low.guide = Script(plain, by_turns, 0.0, {6: [0, 400, 7]})
    again = plain.submit(low)
    plain.run()
    assert again.ids == held.ids


def test_a_sequence_that_gave_way_gets_its_mask_again() -> None:
    policy = CachePolicy(min_tokens=4, gap=4, interval=32)
    world = World(limits={"max_seqs": 1, "cache": policy})
    low = job(20, 60, seed=1, priority=1, guide=Script(world, lambda n: LOW))
    held = world.submit(low)
    world.run(until=0.15)
    world.submit(job(9, 5, seed=2))
    world.run()
    assert world.scheduler.snapshot().preemptions == 1
    assert len(held.ids) == 60
    assert all(token < 40 for token in held.ids)
