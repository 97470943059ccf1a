"""Server-sent events: the frame of one event, and the heartbeat of a silent stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DONE = b"data: [DONE]\n\n"


def frame(data: bytes, event: bytes | None = None) -> bytes:
    """One event. data: UTF-8 text, as a rule JSON on one line; line ends inside it are kept by
    giving each line its own `data:` field. event: the event's name."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event, data)


class Heartbeat:
    """Calls `send()` whenever `interval_s` seconds passed without a `touch()`.

    `touch` is called on every write and only notes the time; one timer re-arms itself. A send
    counts as a touch. Starts running at once; `stop` ends it for good.
    """

    __slots__ = ("_handle", "_interval_s", "_last", "_loop", "_send")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interval_s: float, send: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._send = send
        self._last = loop.time()
        self._handle: asyncio.TimerHandle | None = loop.call_later(interval_s, self._fire)

    def touch(self) -> None:
        self._last = self._loop.time()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        now = self._loop.time()
        if now >= self._last + self._interval_s:
            self._last = now
            # Armed first: `send` may stop the heartbeat.
            self._handle = self._loop.call_later(self._interval_s, self._fire)
            self._send()
        else:
            self._handle = self._loop.call_at(self._last + self._interval_s, self._fire)
