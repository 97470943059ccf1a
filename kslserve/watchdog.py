"""Progress deadlines. The event loop's is kept by a C thread, so that it also fires while a native
call holds the interpreter; the engine's reads counters and never the device.

A loop that stands still ends the process with status 1 and a dump of all stacks. Waves that stand
still are reported to the owner, who decides.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Callable
from typing import Protocol

TICK_S_MAX = 1.0


class Progress(Protocol):
    """What an engine says of its waves; see engine.types."""

    @property
    def submitted(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def completed(self) -> int: ...


class Watchdog:
    """loop_s, wave_s: deadlines in seconds, 0: none. on_stall is called once, with a sentence, when
    a submitted wave has neither started nor completed for wave_s."""

    def __init__(
        self,
        loop_s: float,
        wave_s: float,
        on_stall: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop_s = loop_s
        self._wave_s = wave_s
        self._on_stall = on_stall
        self._clock = clock
        self._progress: Callable[[], Progress] | None = None
        self._seen = (0, 0)
        self._since = clock()
        self._tripped = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed = False
        deadlines = [s / 4 for s in (loop_s, wave_s) if s]
        self._tick_s = min([TICK_S_MAX, *deadlines])

    def start(self) -> None:
        """Begin on the running loop. Without any deadline it does nothing."""
        if self._loop_s or self._wave_s:
            self._tick()

    def watch(self, progress: Callable[[], Progress]) -> None:
        """Watch an engine's counters from now on."""
        self._progress = progress
        self._since = self._clock()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
            self._armed = False

    def check(self) -> None:
        """Compare the counters with the last look."""
        if self._progress is None or not self._wave_s or self._tripped:
            return
        progress = self._progress()
        now = self._clock()
        seen = (progress.started, progress.completed)
        if seen != self._seen or progress.completed >= progress.submitted:
            self._seen, self._since = seen, now
        elif now - self._since >= self._wave_s:
            self._tripped = True
            self._on_stall(f"No wave has progressed for {now - self._since:.1f} s.")

    def _tick(self) -> None:
        # The standard error of the process, not a replacement: a C thread writes to its descriptor.
        if self._loop_s and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(self._loop_s, exit=True, file=sys.__stderr__)
            self._armed = True
        self.check()
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
