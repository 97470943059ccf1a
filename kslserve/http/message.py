"""What handlers see: a request, and the reply to it; and the bytes of response heads.

A `Reply` is one response: either fixed (`send`) or a stream (`start_stream`, `write`, `finish`). It
outlives its connection: once the client is gone every call is a quiet no-op, so that producers need
no check of their own. It never makes a task and never waits.
"""

from __future__ import annotations

import http
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
Header = tuple[str, str]

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in http.HTTPStatus
}
CONTINUE = STATUS_LINES[100] + b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(1024))
STREAM_HEADERS: tuple[Header, ...] = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
REQUEST_ID_MAX = 256


@dataclass(slots=True)
class Request:
    """One request. Its owner fills `body` when the last byte is there, and the router fills
    `params` and `reply_headers`; handlers only read.

    path: as sent, without the query. headers: lower-case names; repeated ones are joined by a
    comma. params: percent-decoded parameters of the route. peer, local: addresses of the two ends,
    `host:port` and host; empty on a Unix socket. reply_headers: headers that any response to it
    carries.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    request_id: str
    peer: str = ""
    local: str = ""
    version: str = "1.1"
    params: dict[str, str] = field(default_factory=dict)
    reply_headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response. Without a content-type header it is JSON."""

    status: int
    headers: tuple[Header, ...] = ()
    body: bytes = b""


def sane_request_id(text: str | None) -> str:
    """The client's id when it is printable ASCII of 1 to 256 characters, else a new one."""
    if text and len(text) <= REQUEST_ID_MAX and text.isascii() and text.isprintable():
        return text
    return "req_" + secrets.token_hex(12)


def encode_headers(headers: Iterable[Header]) -> bytes:
    """Header lines. Raises ValueError for a line end inside one: a bug that must not reach the
    wire."""
    lines = []
    for name, value in headers:
        line = f"{name}: {value}"
        if "\r" in line or "\n" in line:
            raise ValueError(f"line end in header {name!r}")
        lines.append(line + "\r\n")
    return "".join(lines).encode("latin-1", "replace")


Handler = Callable[[Request, "Reply"], Awaitable[None]]


class Outlet(Protocol):
    """What a reply needs from its connection."""

    @property
    def paused(self) -> bool: ...
    def send_bytes(self, data: bytes) -> None: ...
    def date_line(self) -> bytes: ...
    def keeps_alive(self, reply: Reply) -> bool: ...
    def reply_done(self, reply: Reply) -> None: ...
    def reply_aborted(self, reply: Reply) -> None: ...


class Reply:
    """The response to one request. Every method is called on the loop thread.

    started: the head was sent. paused: the reader is behind, and what is written now is kept and
    merged until it catches up; set by the connection. closed: nothing more can be written, because
    the response is complete, was aborted, or the client left. lost: the client left before it was
    complete. status: the status that was sent. request: None when the head was refused before there
    was one.
    """

    __slots__ = (
        "_chunked", "_close_callbacks", "_drain_callbacks", "_open", "_outlet", "_pending",
        "_send", "closed", "head_only", "keep_alive", "lost", "paused", "request", "request_id",
        "started", "status", "streaming",
    )  # fmt: skip

    def __init__(self, outlet: Outlet, request: Request | None, request_id: str) -> None:
        self._outlet = outlet
        self._send = outlet.send_bytes
        self.paused = outlet.paused
        self.request = request
        self.request_id = request_id
        self.head_only = request is not None and request.method == "HEAD"
        self._chunked = request is None or request.version != "1.0"
        self.started = False
        self.streaming = False
        self._open = False  # parts of a stream can be written
        self.closed = False
        self.lost = False
        self.keep_alive = False  # decided with the head
        self.status: int | None = None
        self._pending = bytearray()
        self._close_callbacks: list[Callable[[], None]] = []
        self._drain_callbacks: list[Callable[[], None]] = []

    def send(
        self,
        status: int,
        body: bytes = b"",
        content_type: str = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        """The whole response. Raises RuntimeError when one was started already."""
        if self.closed:
            return
        own: list[Header] = []
        has_body = status not in (204, 304)
        if has_body:
            own = [("content-type", content_type), ("content-length", str(len(body)))]
        self.keep_alive = self._outlet.keeps_alive(self)
        data = self._head(status, own, headers)
        self._send(data + body if has_body and not self.head_only else data)
        self._complete()

    def respond(self, response: Response) -> None:
        """`send` of a value."""
        content_type = JSON
        headers = []
        for name, value in response.headers:
            if name.lower() == "content-type":
                content_type = value
            else:
                headers.append((name, value))
        self.send(response.status, response.body, content_type, headers)

    def start_stream(
        self, content_type: str = EVENT_STREAM, headers: Iterable[Header] = ()
    ) -> None:
        """Send the head of a 200 response whose body follows by `write`. It is chunked, or for an
        HTTP/1.0 client ended by closing. Raises RuntimeError when a response was started
        already."""
        if self.closed:
            return
        chunked = self._chunked
        self.keep_alive = chunked and self._outlet.keeps_alive(self)
        own: list[Header] = [("content-type", content_type)]
        if content_type.startswith(EVENT_STREAM):
            own.extend(STREAM_HEADERS)
        if chunked:
            own.append(("transfer-encoding", "chunked"))
        data = self._head(200, own, headers)
        self.streaming = True
        self._open = not self.head_only
        self._send(data)

    def write(self, data: bytes) -> None:
        """A part of the stream, sent at once; while the reader is behind it is kept and merged with
        the next ones. The caller bounds how much that can become (see `paused` and `on_drain`)."""
        if not self._open:
            if data and not (self.closed or self.streaming):
                raise RuntimeError("no stream was started")
        elif self.paused:
            self._pending += data
        elif data and self._chunked and len(data) < len(_CHUNK_HEADS):
            self._send(b"".join((_CHUNK_HEADS[len(data)], data, b"\r\n")))
        elif data:
            self._send(self._framed(data))

    def finish(self, last: bytes = b"") -> None:
        """End the stream, after a last part."""
        if self.closed:
            return
        if not self.streaming:
            raise RuntimeError("no stream was started")
        if not self.head_only:
            data = bytes(self._pending) + last
            tail = self._framed(data) if data else b""
            if self._chunked:
                tail += LAST_CHUNK
            if tail:
                self._send(tail)
        self._complete()

    def abort(self) -> None:
        """Close the connection without the end mark of the stream, so that the client can tell.
        What was written before is still delivered."""
        if self.closed:
            return
        if self._pending:
            self._send(self._framed(bytes(self._pending)))
        self._drop()
        self._outlet.reply_aborted(self)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call once when the client leaves before the response is complete; at once if it has
        left."""
        if not self.closed:
            self._close_callbacks.append(callback)
        elif self.lost:
            callback()

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Call each time when the reader has caught up after a pause, until the response ends."""
        if not self.closed:
            self._drain_callbacks.append(callback)

    # The connection's side.

    def client_lost(self) -> list[Callable[[], None]]:
        """Close because the client left; returns what is to be called."""
        if self.closed:
            return []
        callbacks = self._close_callbacks
        self.lost = True
        self._drop()
        return callbacks

    def drained(self) -> list[Callable[[], None]]:
        """Send what was kept, `paused` being False again; returns what is to be called when the
        reader has caught up."""
        if self._pending:
            data = bytes(self._pending)
            self._pending.clear()
            self._send(self._framed(data))
        return [] if self.paused else list(self._drain_callbacks)

    def _framed(self, data: bytes) -> bytes:
        if not self._chunked:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _head(self, status: int, own: list[Header], headers: Iterable[Header]) -> bytes:
        if self.started:
            raise RuntimeError("the response was started already")
        own.append(("x-request-id", self.request_id))
        if not self.keep_alive:
            own.append(("connection", "close"))
        elif self.request is not None and self.request.version == "1.0":
            own.append(("connection", "keep-alive"))
        own.extend(headers)
        if self.request is not None:
            own.extend(self.request.reply_headers)
        lines = encode_headers(own)
        self.started = True
        self.status = status
        return STATUS_LINES[status] + self._outlet.date_line() + lines + b"\r\n"

    def _complete(self) -> None:
        self._drop()
        self._outlet.reply_done(self)

    def _drop(self) -> None:
        self.closed = True
        self._open = False
        self._pending = bytearray()
        self._close_callbacks = []
        self._drain_callbacks = []
