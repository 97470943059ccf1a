"""Eviction by value against least recently used, on a trace shaped like agents at work.

Several agents of two kinds, each with a system prompt of its kind, take turns that grow their
conversations; they start subagents that live for a few turns, repeat a request now and then, and
ask one-shot side questions. There are fewer slabs than conversations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.cache.value import Score, recency, value
from kslserve.sched.scheduler import Job
from tests.world import SIZES, Recorder, World

POOLS = replace(SIZES, slabs=4 + 14, blocks=400, blocks_per_slot=64)


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(4, 512) for _ in range(n)]


class Agent:
    """One conversation. Its next turn is submitted when the last one ended and the agent has used
    its tools."""

    def __init__(self, trace: Trace, system: list[int], name: str, main: bool = True) -> None:
        self.trace = trace
        self.name = name
        # Of its own: what it does must not depend on who else is fast.
        self.rng = random.Random(name)
        self.ids = list(system)
        self.system = len(system)
        self.turns = self.rng.randrange(6, 16) if main else self.rng.randrange(1, 4)
        self.main = main
        self.later()

    def later(self) -> None:
        self.trace.world.clock.call_later(self.rng.expovariate(1.0), self.turn)

    def turn(self) -> None:
        trace, rng = self.trace, self.rng
        self.ids += text(rng, rng.randrange(10, 50))
        self.send()
        if self.main and rng.random() < 0.15:
            for i in range(rng.choice([1, 3])):
                Agent(trace, trace.systems[2], f"{self.name}.{self.turns}.{i}", False)
        if rng.random() < 0.15:
            trace.submit(rng, text(rng, rng.randrange(20, 40)), 0, 4)

    def send(self) -> None:
        self.ids = self.ids[: 64 * 16 - 40]
        self.trace.submit(self.rng, [*self.ids, 1, 2, 3], self.system, 12, self.answered)

    def answered(self, recorder: Recorder) -> None:
        self.ids += [1, 2, 3, *recorder.ids]
        self.turns -= 1
        if self.turns > 0 and len(self.ids) < 64 * 16 - 100:
            if self.rng.random() < 0.07:
                del self.ids[-len(recorder.ids) - 3 :]
                self.send()
            else:
                self.later()


class Trace:
    def __init__(self, seed: int, score: Score) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.world = World(
            POOLS,
            limits={"cache": CachePolicy(interval=128), "context": 1024, "max_queue": 1000},
            options={"strict": False, "wave_s": 0.001, "column_s": 0.0001},
        )
        self.world.scheduler.cache.device.score = score
        self.prompt_tokens = 0
        self.systems = [text(rng, n) for n in (160, 120, 90)]
        for i in range(14):
            Agent(self, self.systems[i % 2], f"{seed}-{i}")
        self.world.clock.call_later(20.0, self.second_shift)
        while self.world.clock.step():
            pass
        self.world.check_all_free()

    @property
    def saved(self) -> int:
        return self.world.scheduler.cache.tokens_saved

    def second_shift(self) -> None:
        for i in range(6):
            Agent(self, self.systems[i % 2], f"{self.seed}-second-{i}")

    def submit(
        self,
        rng: random.Random,
        ids: list[int],
        system: int,
        new: int,
        then: Callable[[Recorder], None] | None = None,
    ) -> None:
        self.prompt_tokens += len(ids)

        def hook(event: str, recorder: Recorder) -> None:
            if event == "ended" and then is not None:
                then(recorder)

        boundaries = (system, len(ids) - 3) if system else ()
        self.world.submit(
            Job(
                np.array(ids, np.int32),
                new,
                SamplingParams(temperature=1.0),
                rng.randrange(1 << 30),
                boundaries=boundaries,
            ),
            hook,
        )


@pytest.mark.parametrize("seed", range(3))
def test_value_saves_more_than_recency(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    by_value, by_recency = Trace(seed, value), Trace(seed, recency)
    shares = [t.saved / t.prompt_tokens for t in (by_value, by_recency)]
    with capsys.disabled():
        print(f"\ntokens saved: by value {shares[0]:.1%}, least recently used {shares[1]:.1%}")
    assert shares[0] > shares[1]
