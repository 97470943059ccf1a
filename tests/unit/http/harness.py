"""A connection without sockets: a transport that records, a clock that is moved by hand, and a
server of small handlers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from kslserve import log
from kslserve.errors import InvalidRequest, KslError
from kslserve.http.flow import HttpLimits
from kslserve.http.message import Reply, Request
from kslserve.http.protocol import Connection
from kslserve.http.router import Router
from kslserve.http.shared import Shared
from kslserve.metrics import Metrics

HIGH_WATER = 64
TURNS = 6  # of the loop, in which a handler that waits for nothing is done


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """The part of an event loop that the HTTP layer uses, in virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer(when, call)
        self.timers.append(timer)
        return timer

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        return self.call_at(self.now + delay, call)

    def create_task(self, coroutine: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)

    @property
    def armed(self) -> int:
        return sum(timer.call is not None for timer in self.timers)

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [t for t in self.timers if t.when <= end and t.call is not None]:
            timer = min(due, key=lambda t: t.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            assert timer.call is not None
            timer.call()
            await turns()
        self.now = end


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class FakeSocket:
    """The socket behind a transport; `error` is what the system noticed about the peer."""

    def __init__(self) -> None:
        self.error = 0

    def getsockopt(self, level: int, option: int) -> int:
        return self.error


class MockTransport(asyncio.Transport):
    """Records what is written. While `blocked`, nothing is taken until `take`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._socket = FakeSocket()
        extra = {"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8100)}
        super().__init__(extra | {"socket": self._socket})
        self._protocol = protocol
        self.sent = b""
        self.writes: list[bytes] = []
        self.blocked = False
        self.waiting = b""
        self.paused_writing = False
        self.reading = True
        self.eof = False
        self.closing = False
        self.aborted = False
        self.lost = False

    @property
    def socket(self) -> FakeSocket:
        return self._socket

    def write(self, data: bytes) -> None:
        assert not self.eof, "write after the end"
        assert not self.closing, "write after closing"
        self.writes.append(data)
        if not self.blocked:
            self.sent += data
            return
        self.waiting += data
        if len(self.waiting) > HIGH_WATER and not self.paused_writing:
            self.paused_writing = True
            self._protocol.pause_writing()

    def take(self, count: int) -> None:
        """The reader takes some of what waits."""
        self.sent += self.waiting[:count]
        self.waiting = self.waiting[count:]
        if self.paused_writing and len(self.waiting) <= HIGH_WATER // 4:
            self.paused_writing = False
            self._protocol.resume_writing()
        if self.closing and not self.waiting:
            self.lose()

    def get_write_buffer_size(self) -> int:
        return len(self.waiting)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.closing:
            raise RuntimeError("the handler is closed")  # as uvloop does
        self.eof = True

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        assert self.reading
        assert not self.closing
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        assert not self.closing
        self.reading = True

    def close(self) -> None:
        self.closing = True
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self.closing = self.aborted = True
        self.waiting = b""
        asyncio.get_running_loop().call_soon(self.lose)

    def lose(self, error: Exception | None = None) -> None:
        if not self.lost:
            self.lost = self.closing = True
            self._protocol.connection_lost(error)


class Server:
    """Small handlers. `events` is what they saw, in order."""

    def __init__(
        self, limits: HttpLimits | None = None, clock: Clock | None = None, **options: Any
    ) -> None:
        self.events: list[str] = []
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self.go = asyncio.Event()
        self.metrics = Metrics()
        self.router = Router(**options)
        self.limits = limits or HttpLimits()
        self.clock = clock or Clock()
        add = self.router.add
        add("GET", "/hello", self.hello)
        add("POST", "/echo", self.echo)
        add("GET", "/stream", self.stream)
        add("POST", "/wait", self.wait)
        add("GET", "/wait", self.wait)
        add("POST", "/wait_stream", self.wait_stream)
        add("GET", "/error", self.error)
        add("GET", "/bug", self.bug)
        add("GET", "/bug_stream", self.bug_stream)
        add("GET", "/forgets", self.forgets)
        add("GET", "/items/{id}", self.item)
        add("GET", "/healthz", self.hello)
        self.shared = Shared(
            self.router,
            self.limits,
            log.get("test"),
            self.clock,  # type: ignore[arg-type]
            self.metrics.gauge("connections_open", ""),
        )

    async def hello(self, request: Request, reply: Reply) -> None:
        reply.send(200, b"hello", "text/plain")

    async def echo(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        reply.send(200, request.body, request.headers.get("content-type", "text/plain"))

    async def stream(self, request: Request, reply: Reply) -> None:
        reply.start_stream()
        reply.write(b"one")
        reply.write(b"")
        reply.write(b"two")
        reply.finish()

    async def wait(self, request: Request, reply: Reply) -> None:
        """Answers when it may; notes when the client left."""
        self.events.append("start")
        gone = asyncio.Event()
        reply.on_close(lambda: self.events.append("gone"))
        reply.on_close(gone.set)
        tasks = [asyncio.ensure_future(event.wait()) for event in (self.go, gone)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        reply.send(200, b"done", "text/plain")
        self.events.append("end")

    async def wait_stream(self, request: Request, reply: Reply) -> None:
        """A stream that the test writes through `replies`."""
        reply.on_close(lambda: self.events.append("gone"))
        reply.start_stream()
        self.replies.append(reply)
        while not reply.closed:  # noqa: ASYNC110 - a reply tells nobody that it is complete
            await asyncio.sleep(0)
        self.events.append("end")

    async def error(self, request: Request, reply: Reply) -> None:
        raise InvalidRequest("no such thing", param="x")

    async def bug(self, request: Request, reply: Reply) -> None:
        raise ValueError("secret detail")

    async def bug_stream(self, request: Request, reply: Reply) -> None:
        reply.start_stream()
        reply.write(b"one")
        raise KslError("too late for a status")

    async def forgets(self, request: Request, reply: Reply) -> None:
        return

    async def item(self, request: Request, reply: Reply) -> None:
        reply.send(200, f"{request.params['id']}|{request.query}".encode(), "text/plain")

    def connect(self) -> tuple[Connection, MockTransport]:
        connection = Connection(self.shared)
        transport = MockTransport(connection)
        connection.connection_made(transport)
        return connection, transport


def feed(connection: Connection, transport: MockTransport, data: bytes) -> None:
    """Bytes from the client, unless its connection is closed."""
    if not transport.closing:
        connection.data_received(data)


def plain(data: bytes) -> bytes:
    """Responses without what differs each time: the date, and ids that the server made."""
    data = re.sub(rb"date: \w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT\r\n", b"", data)
    return re.sub(rb"x-request-id: req_[0-9a-f]{24}", b"x-request-id: NEW", data)
