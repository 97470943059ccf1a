"""Deadlines, heads of responses, the reply's rules, event frames and heartbeats."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.http import sse
from kslserve.http.flow import Deadline
from kslserve.http.message import STATUS_LINES, Response, encode_headers, sane_request_id

from .harness import Clock, Server, turns


def as_loop(clock: Clock) -> asyncio.AbstractEventLoop:
    return cast(asyncio.AbstractEventLoop, clock)


# Deadlines.


async def test_deadline_moves_later_without_a_new_timer() -> None:
    clock = Clock()
    fired: list[float] = []
    deadline = Deadline(as_loop(clock), lambda: fired.append(clock.now))
    deadline.set(10)
    for _ in range(5):
        await clock.advance(4)
        deadline.set(10)
        assert clock.armed == 1
    await clock.advance(100)
    assert fired == [1030]
    assert clock.armed == 0


async def test_deadline_moves_earlier() -> None:
    clock = Clock()
    fired: list[float] = []
    deadline = Deadline(as_loop(clock), lambda: fired.append(clock.now))
    deadline.set(100)
    deadline.set(5)
    assert clock.armed == 1
    await clock.advance(200)
    assert fired == [1005]


async def test_cleared_deadline() -> None:
    clock = Clock()
    fired: list[float] = []
    deadline = Deadline(as_loop(clock), lambda: fired.append(clock.now))
    deadline.set(5)
    deadline.clear()
    await clock.advance(20)
    deadline.set(5)
    deadline.set(0)
    await clock.advance(20)
    deadline.set(5)
    deadline.close()
    assert clock.armed == 0
    await clock.advance(20)
    assert fired == []


# Heads.


@given(st.text(max_size=300))
def test_request_ids(text: str) -> None:
    made = sane_request_id(text)
    if 0 < len(text) <= 256 and all(" " <= c <= "~" for c in text):
        assert made == text
    else:
        assert made.startswith("req_")
        assert made != sane_request_id(None)


def test_header_lines() -> None:
    assert encode_headers([("a", "b"), ("c", "é")]) == b"a: b\r\nc: \xe9\r\n"
    for name, value in (("a", "b\r\nc: d"), ("a\n", "b"), ("a", "\r")):
        with pytest.raises(ValueError, match="line end"):
            encode_headers([(name, value)])


def test_status_lines() -> None:
    assert STATUS_LINES[421] == b"HTTP/1.1 421 Misdirected Request\r\n"
    assert STATUS_LINES[431].startswith(b"HTTP/1.1 431 ")


# The rules of a reply.


async def test_reply_is_sent_once() -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(b"POST /wait_stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await turns()
    (reply,) = server.replies
    for again in (lambda: reply.send(200), reply.start_stream):
        with pytest.raises(RuntimeError, match="started already"):
            again()
    reply.finish()
    reply.send(200, b"after the end")
    reply.write(b"after the end")
    assert transport.sent.endswith(b"\r\n\r\n0\r\n\r\n")
    await turns()


async def test_write_needs_a_stream() -> None:
    server = Server()
    seen: list[str] = []

    async def handler(request: object, reply: object) -> None:
        for call in (lambda: reply.write(b"x"), reply.finish):  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="no stream"):
                call()
            seen.append("raised")
        reply.abort()  # type: ignore[attr-defined]

    server.router.add("GET", "/x", handler)
    connection, transport = server.connect()
    connection.data_received(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await turns()
    assert seen == ["raised", "raised"]
    assert transport.sent == b""
    assert transport.lost


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(status: int) -> None:
    server = Server()

    async def handler(request: object, reply: object) -> None:
        reply.respond(Response(status, (("x", "y"),), b"no"))  # type: ignore[attr-defined]

    server.router.add("GET", "/x", handler)
    connection, transport = server.connect()
    connection.data_received(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await turns()
    assert transport.sent.endswith(b"x: y\r\n\r\n")
    assert b"content-" not in transport.sent


async def test_response_with_its_own_type() -> None:
    server = Server(on_error=lambda r, e: Response(e.status, (("Content-Type", "text/x"),), b"e"))
    connection, transport = server.connect()
    connection.data_received(b"GET /error HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await turns()
    assert transport.sent.count(b"ontent-type") + transport.sent.count(b"ontent-Type") == 1
    assert b"content-type: text/x\r\n" in transport.sent


async def test_cors_headers_are_on_every_response() -> None:
    server = Server(cors_origins=["https://app.example"])
    connection, transport = server.connect()
    for path in (b"/hello", b"/none", b"/stream", b"/bug"):
        transport.sent = b""
        connection.data_received(
            b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nOrigin: https://app.example\r\n\r\n"
        )
        await turns()
        assert b"access-control-allow-origin: https://app.example\r\n" in transport.sent
        assert transport.sent.count(b"x-request-id: ") == 1


# Events.


def test_frames() -> None:
    assert sse.frame(b"{}") == b"data: {}\n\n"
    assert sse.frame(b"{}", b"ping") == b"event: ping\ndata: {}\n\n"
    assert sse.frame(b"a\nb\r\nc\rd", b"x") == b"event: x\ndata: a\ndata: b\ndata: c\ndata: d\n\n"
    assert sse.frame(b"") == b"data: \n\n"
    assert sse.frame(b"[DONE]") == sse.DONE


async def test_heartbeat_fills_silence_only() -> None:
    clock = Clock()
    beats: list[float] = []
    heartbeat = sse.Heartbeat(as_loop(clock), 10, lambda: beats.append(clock.now))
    await clock.advance(9)
    for _ in range(20):
        heartbeat.touched = True
        assert clock.armed == 1
        await clock.advance(5)
    assert beats == []
    await clock.advance(26)  # the last write was 5 s before
    assert beats == [1112.5, 1122.5, 1132.5]
    heartbeat.stop()
    heartbeat.stop()
    assert clock.armed == 0
    await clock.advance(100)
    assert len(beats) == 3


@pytest.mark.parametrize("moment", [0.1, 2.4, 2.6, 4.9, 9.9])
async def test_silence_is_never_longer_than_the_interval(moment: float) -> None:
    clock = Clock()
    beats: list[float] = []
    heartbeat = sse.Heartbeat(as_loop(clock), 10, lambda: beats.append(clock.now))
    await clock.advance(moment)
    heartbeat.touched = True
    wrote = clock.now
    await clock.advance(40)
    heartbeat.stop()
    assert 7.5 <= beats[0] - wrote <= 10
    assert all(later - beat == 10 for beat, later in pairwise(beats))


async def test_heartbeat_can_be_stopped_by_its_own_beat() -> None:
    clock = Clock()
    beats: list[float] = []

    def beat() -> None:
        beats.append(clock.now)
        heartbeat.stop()

    heartbeat = sse.Heartbeat(as_loop(clock), 10, beat)
    await clock.advance(100)
    assert beats == [1010]
    assert clock.armed == 0
