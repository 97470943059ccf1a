"""Flow of bytes in both directions: bounds, deadlines, write progress, and clients that close
halfway.

Everything here is per connection and driven by it. A deadline costs one timer per connection
however often it moves: moving it later only changes a number, and the timer re-arms itself when it
fires early.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

PROBE_DELAYS_S = (0.02, 0.1, 0.5)
PROBE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP layer. Seconds of 0 mean no limit; so does 0 for `max_requests`."""

    body_bytes: int = 32 << 20
    head_bytes: int = 64 << 10  # request line and headers; trailers of a chunked body likewise
    head_lines: int = 256
    backlog_bytes: int = 64 << 10  # pipelined bytes held while a response is made
    io_timeout_s: float = 30.0  # the whole head, and each pause between parts of a body
    idle_timeout_s: float = 75.0  # a connection without a request
    write_timeout_s: float = 60.0  # a reader that takes nothing
    linger_s: float = 2.0  # reading on after an early refusal, so that the client sees the answer
    max_requests: int = 0  # POST requests answered at once; more get 429
    max_connections: int = 800


class Deadline:
    """A movable deadline that calls `call` once when it passes. Not armed at first."""

    __slots__ = ("_armed_at", "_at", "_call", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._at: float | None = None
        self._armed_at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now; 0 clears it."""
        if seconds <= 0:
            self._at = None
            return
        self._at = self._loop.time() + seconds
        if self._handle is not None:
            if self._armed_at <= self._at:
                return
            self._handle.cancel()
        self._arm()

    def clear(self) -> None:
        """No deadline for now; the timer is kept, for the next one."""
        self._at = None

    def close(self) -> None:
        """No deadline and no timer any more."""
        self._at = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        assert self._at is not None
        self._armed_at = self._at
        self._handle = self._loop.call_at(self._at, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if self._at is None:
            return
        if self._loop.time() < self._at:
            self._arm()
            return
        self._at = None
        self._call()


class WriteFlow:
    """Watches a reader who is behind. written: bytes given to the transport, counted by who writes
    them. on_stuck: called when the reader has taken no byte for `timeout_s` while output waited."""

    __slots__ = (
        "_deadline",
        "_on_stuck",
        "_taken",
        "_timeout_s",
        "_transport",
        "written",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        timeout_s: float,
        on_stuck: Callable[[], None],
    ) -> None:
        self.written = 0
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._taken = 0
        self._deadline = Deadline(loop, self._check)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    def watch(self) -> None:
        """Demand progress from now on, until all output is taken."""
        self._taken = self.written - self.waiting_bytes
        self._deadline.set(self._timeout_s)

    def relax(self) -> None:
        """The reader has caught up."""
        self._deadline.clear()

    def close(self) -> None:
        self._deadline.close()

    def _check(self) -> None:
        waiting = self.waiting_bytes
        if waiting == 0:
            return
        taken = self.written - waiting
        if taken > self._taken:
            self._taken = taken
            self._deadline.set(self._timeout_s)
        else:
            self._on_stuck()


class PeerProbe:
    """Tells a client that closed from one that only ended its sending side.

    Both look the same here: an end of input. But the system of a client that closed answers the
    next bytes with a reset, which shows as a socket error. So the owner writes something harmless,
    and this looks for the error soon after, and then every second until `stop`.
    """

    __slots__ = ("_count", "_handle", "_loop", "_on_gone", "_socket")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        on_gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._socket = transport.get_extra_info("socket")
        self._on_gone = on_gone
        self._count = 0
        self._handle: asyncio.TimerHandle | None = None
        self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        if self._count < len(PROBE_DELAYS_S):
            delay_s = PROBE_DELAYS_S[self._count]
        else:
            delay_s = PROBE_INTERVAL_S
        self._count += 1
        self._handle = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        try:
            failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except OSError:
            failed = True
        if failed:
            self._handle = None
            self._on_gone()
        else:
            self._arm()
