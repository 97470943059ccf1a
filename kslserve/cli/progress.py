"""Progress on standard output: a bar on a terminal, a line per layer elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from kslserve.ksl.convert import Progress

BAR_WIDTH = 24
REDRAW_S = 0.1
MIB = 1 << 20


class Bar:
    """One line that is drawn over: share, rate, remaining time. clock: seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._started = clock()
        self._drawn = -1.0
        self._width = 0

    def advance(self, done: int, total: int) -> None:
        now = self._clock()
        if now - self._drawn < REDRAW_S and done < total:
            return
        self._drawn = now
        share = done / total if total else 1.0
        rate = done / max(now - self._started, 1e-9)
        filled = int(BAR_WIDTH * share)
        left = _duration((total - done) / rate) if rate > 0 else "?"
        text = (
            f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {100 * share:3.0f} %  "
            f"{rate / MIB:.0f} MiB/s  {left} left"
        )
        self._out.write("\r" + text.ljust(self._width))
        self._out.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0


class BarProgress(Progress):
    """A conversion on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self.bar = Bar(out)

    def advance(self, done: int, total: int) -> None:
        self.bar.advance(done, total)


class LineProgress(Progress):
    """A conversion whose output goes elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def group(self, name: str, tensors: int, size: int) -> None:
        self._out.write(f"{name}: {tensors} tensors, {size} bytes\n")
        self._out.flush()


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
