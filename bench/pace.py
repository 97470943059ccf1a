"""How fast a scheduler serves jobs, what of their drafts came true, and what ratios of such figures
say; shared by the benches of speculation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kslserve.core.usage import FinishReason
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Done, Engine, Wave
from kslserve.errors import KslError
from kslserve.metrics import Metrics
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from kslserve.sched.spec.policy import SpecPolicy

WIDTH = 0.015  # half of an interval that is narrow enough
QUARTILE = 0.674  # of a normal distribution, in deviations


class Clock:
    """A sink that notes when tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of the waves that sampled for it
        self.counts: list[int] = []
        self.ids: list[int] = []

    def admitted(self, cached_tokens: int) -> None:
        pass

    def tokens(self, ids: Items[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(len(ids))
        self.ids += ids

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        assert error is None, error


def pace(clocks: list[Clock]) -> tuple[int, float]:
    """Tokens after the wave that gave the last stream its first one, and the seconds they took."""
    start = max(clock.times[0] for clock in clocks)
    end = max(clock.times[-1] for clock in clocks)
    tokens = sum(
        count
        for clock in clocks
        for at, count in zip(clock.times, clock.counts, strict=True)
        if at > start
    )
    return tokens, end - start


class Turns:
    """One engine for several schedulers, of which one has work at a time."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.on_done: Callable[[Done], None] | None = None
        engine.start(self._done)

    def _done(self, done: Done) -> None:
        assert self.on_done is not None
        self.on_done(done)


class Turn:
    """The engine as one of the schedulers sees it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._on_done: Callable[[Done], None] | None = None
        self.info = turns.engine.info
        self.progress, self.close = turns.engine.progress, turns.engine.close

    def start(self, on_done: Callable[[Done], None]) -> None:
        self._on_done = on_done

    def submit(self, wave: Wave) -> bool:
        self._turns.on_done = self._on_done
        return self._turns.engine.submit(wave)


@dataclass(slots=True)
class Tally:
    """What the batches of one side of a pair took."""

    tokens: int = 0
    seconds: float = 0.0
    sampled: int = 0
    waves: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """One batch: run plainly, with drafts, and plainly again."""

    before: Tally
    drafts: Tally
    after: Tally

    @property
    def gain(self) -> float:
        plain = (self.before.tokens + self.after.tokens) / (
            self.before.seconds + self.after.seconds
        )
        return self.drafts.rate / plain

    @property
    def null(self) -> float:
        return self.before.rate / self.after.rate


class Server:
    """A scheduler, for as long as the bench runs."""

    def __init__(self, engine: Engine, context: int, policy: SpecPolicy | None) -> None:
        info = engine.info
        self.scheduler = Scheduler(
            engine,
            SchedLimits(info.slots, 64, 512, 50.0, 250.0, 0.0, 0.0, context, spec=policy),
            Metrics(),
        )
        self.scheduler.start()

    async def run(self, jobs: list[Job], tally: Tally) -> list[list[int]]:
        """Run jobs together; what each of them sampled."""
        clocks = [Clock() for _ in jobs]
        sequences = [self.scheduler.submit(j, c) for j, c in zip(jobs, clocks, strict=True)]
        while not self.scheduler.idle:
            await self.scheduler._wait_idle()
        for sequence in sequences:
            if sequence.drafter is not None:
                tally.drafted += sequence.drafter.stats.drafted
                tally.accepted += sequence.drafter.stats.accepted
        tokens, seconds = pace(clocks)
        tally.tokens += tokens
        tally.seconds += seconds
        tally.sampled += sum(len(c.ids) for c in clocks)
        tally.waves += sum(len(c.times) for c in clocks)
        return [c.ids for c in clocks]


def interval(values: Items[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval by order statistics (which covers more from 9 values on)."""
    values = sorted(values)
    n = len(values)
    below = max(0, int(n / 2 - 0.98 * n**0.5))
    return statistics.median(values), values[below], values[n - 1 - below]


def rounds_for(nulls: Items[float], least: int, most: int) -> int:
    """Rounds whose interval should be no wider than WIDTH to each side, if plain runs of the same
    batch lie apart by these factors."""
    quarter, _, three = statistics.quantiles(map(math.log, nulls))
    # Two runs lie apart by twice the variance of one; a run and the mean of two by 3/2 of it.
    deviation = (three - quarter) / (2 * QUARTILE) * 0.75**0.5
    # The median of a normal distribution scatters by (pi / 2n)**0.5.
    return min(max(round(math.pi / 2 * (1.96 * deviation / WIDTH) ** 2), least), most)
