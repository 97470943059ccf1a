"""Server-sent events: the frame of one event, and the heartbeat of a silent stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DONE = b"data: [DONE]\n\n"
_TICKS = 4


def frame(data: bytes, event: bytes | None = None) -> bytes:
    """One event. data: UTF-8 text, as a rule JSON on one line; line ends inside it are kept by
    giving each line its own `data:` field. event: the event's name."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event, data)


def _nothing() -> None: ...


class Heartbeat:
    """Calls `send()` after `interval_s` seconds of silence, or up to a quarter earlier.

    touched: set by whoever writes, which costs a write next to nothing; one timer looks at it four
    times an interval. Starts running at once; `stop` ends it for good.
    """

    __slots__ = ("_handle", "_loop", "_quiet", "_send", "_tick_s", "touched")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, send: Callable[[], None]
    ) -> None:
        self.touched = False
        self._loop = loop
        self._tick_s = interval_s / _TICKS
        self._send = send
        self._quiet = 0  # ticks of silence at most, the one of the last write included
        self._handle: asyncio.TimerHandle | None = loop.call_later(self._tick_s, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._send = _nothing  # whose it was may have this heartbeat

    def _fire(self) -> None:
        # A write may have come right after the tick before this one.
        self._quiet = 1 if self.touched else self._quiet + 1
        self.touched = False
        # Armed first: `send` may stop the heartbeat.
        self._handle = self._loop.call_later(self._tick_s, self._fire)
        if self._quiet == _TICKS:
            self._quiet = 0
            self._send()
            self.touched = False  # its own write
