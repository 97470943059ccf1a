"""FakeEngine: the engine protocol without a model, in virtual or real time.

Tokens are a hash of the seed and the tokens before, the contract and (with `strict`) the state are
checked in full, and faults happen on request. In virtual time a VirtualClock runs the callbacks, so
a simulated day takes seconds and every run is the same."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kslserve.engine.fakemodel import HashModel, TokenModel
from kslserve.engine.fakestate import FakeState
from kslserve.engine.model import PoolSizes
from kslserve.engine.types import Done, EngineInfo, Progress, Wave
from kslserve.errors import EngineError, EnginePoisoned


class VirtualTimer:
    """A callback that is due at a time; `cancel` before then."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that passes only when nothing is left to do at its moment. Seconds from 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._due: list[tuple[float, int, VirtualTimer]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> VirtualTimer:
        """Run `callback` after `delay_s`; those of one moment run in the order of their calls."""
        timer = VirtualTimer(callback)
        self._count += 1
        heapq.heappush(self._due, (self._now + max(0.0, delay_s), self._count, timer))
        return timer

    def step(self, until: float = math.inf) -> bool:
        """Run the next callback that is due by `until`; False, and the time is `until`, when there
        is none."""
        while self._due and self._due[0][0] <= until:
            when, _, timer = heapq.heappop(self._due)
            if timer.callback is not None:
                self._now = max(self._now, when)
                callback, timer.callback = timer.callback, None
                callback()
                return True
        if until != math.inf:
            self._now = max(self._now, until)
        return False

    def run(self, until: float = math.inf) -> None:
        """Run callbacks up to a time, or until there are none."""
        while self.step(until):
            pass


@dataclass(slots=True)
class Faults:
    """refuse: ordinals (from 1) of submits that raise EngineError; fatal: ids of waves that poison
    the engine; slow: seconds that a wave of that id takes on top."""

    refuse: set[int] = field(default_factory=set)
    fatal: set[int] = field(default_factory=set)
    slow: dict[int, float] = field(default_factory=dict)


class FakeEngine:
    """sizes: the pools. clock: virtual time, else the running loop's. A wave takes
    wave_s + columns * column_s. model: chooses the tokens, HashModel(vocab) unless given. strict:
    check waves and state; off only to measure what is left."""

    def __init__(
        self,
        sizes: PoolSizes,
        *,
        vocab: int = 512,
        model: TokenModel | None = None,
        has_mtp: bool = False,
        clock: VirtualClock | None = None,
        wave_s: float = 0.0,
        column_s: float = 0.0,
        strict: bool = True,
        faults: Faults | None = None,
        name: str = "fake",
    ) -> None:
        self.sizes = sizes
        self.faults = faults or Faults()
        self.state = FakeState(sizes, vocab, model or HashModel(vocab), has_mtp, strict)
        self._strict = strict
        self._wave_s = wave_s
        self._column_s = column_s
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_done: Callable[[Done], None] | None = None
        self._waiting: deque[Done] = deque()
        self._busy_until = 0.0
        self.graphs = self.graph_kernels = self.graphs_made = 0  # what `progress` says of them
        self._submits = self._submitted = self._completed = self._last_id = 0
        self._closed = self._doomed = False
        self._poison: str | None = None
        self._info = EngineInfo(
            name=name,
            vocab=vocab,
            hidden=0,
            layers=0,
            slots=sizes.slots,
            slabs=sizes.slabs,
            blocks=sizes.blocks,
            block_tokens=sizes.block_tokens,
            blocks_per_slot=sizes.blocks_per_slot,
            wave_columns=sizes.wave_columns,
            ring_depth=sizes.ring_depth,
            has_mtp=has_mtp,
            numerics=name,
            slab_bytes=self.state.slab_bytes,
            block_bytes=8 * (1 + sizes.block_tokens),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, on_done: Callable[[Done], None]) -> None:
        if self._on_done is not None:
            raise EngineError("The engine was started before.")
        self._on_done = on_done
        if self._clock is None:
            self._loop = asyncio.get_running_loop()

    def submit(self, wave: Wave) -> bool:
        if self._poison is not None:
            raise EnginePoisoned(self._poison)
        if self._closed or self._on_done is None:
            raise EngineError("The engine is not running.")
        if len(self._waiting) >= self.sizes.ring_depth:
            return False
        self._submits += 1
        if self._submits in self.faults.refuse:
            raise EngineError("Refused by a fault hook.")
        if wave.id <= self._last_id:
            raise EngineError(f"Invalid wave: id {wave.id} after {self._last_id}.")
        if self._strict:
            self.state.validate(wave)
        self._last_id = wave.id
        self._submitted += 1
        # Results depend on nothing that happens later, so they are made now: the caller may change
        # the wave after this call.
        fatal = wave.id in self.faults.fatal
        self._doomed = self._doomed or fatal  # waves behind a fatal one never run
        rows, sampled = ([], None) if self._doomed else self.state.run(wave)
        now = self._now()
        start = max(now, self._busy_until)
        end = start + self._duration(wave)
        self._busy_until = end
        done = Done(
            wave.id, rows, int(now * 1e9), int(start * 1e9), int(end * 1e9), sampled=sampled
        )
        if fatal:
            done.error = f"Wave {wave.id} failed by a fault hook."
        self._waiting.append(done)
        self._schedule(end - now)
        return True

    def progress(self) -> Progress:
        phase = "running" if self._waiting else "idle"
        if self._closed:
            phase = "closed"
        elif self._poison is not None:
            phase = "poisoned"
        started = self._completed + bool(self._waiting)
        graphs = self.graphs, self.graph_kernels, self.graphs_made
        return Progress(self._submitted, started, self._completed, phase, *graphs)

    def close(self, deadline_s: float = 5.0) -> None:
        self._closed = True
        self._waiting.clear()

    def _duration(self, wave: Wave) -> float:
        """Seconds that a wave takes, called when its results are known."""
        columns = sum(row.n for row in wave.rows) if self._column_s else 0
        return self._wave_s + columns * self._column_s + self.faults.slow.get(wave.id, 0.0)

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else self._clock.now()

    def _schedule(self, delay_s: float) -> None:
        if self._clock is not None:
            self._clock.call_later(delay_s, self._finish)
        elif delay_s > 0.0:
            assert self._loop is not None
            self._loop.call_later(delay_s, self._finish)
        else:
            assert self._loop is not None
            self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        """The oldest wave ends; every submit scheduled one such call."""
        if self._closed or not self._waiting:
            return
        done = self._waiting.popleft()
        self._completed += 1
        if done.error is not None:
            self._poison = done.error
            self._waiting.clear()
        assert self._on_done is not None
        self._on_done(done)
