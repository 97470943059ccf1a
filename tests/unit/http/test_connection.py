"""What a connection does over time: order, limits, deadlines, slow readers, clients that leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kslserve import log
from kslserve.http.flow import HttpLimits
from kslserve.http.message import Reply

from .harness import HIGH_WATER, MockTransport, Server, plain, turns

GET = b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = b"POST /wait_stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(path: bytes, body: bytes, more: bytes = b"") -> bytes:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + more
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


async def start_stream(server: Server) -> tuple[Reply, MockTransport]:
    connection, transport = server.connect()
    connection.data_received(STREAM)
    await turns()
    transport.sent = b""
    transport.writes.clear()
    return server.replies[-1], transport


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines of this package, wherever they go otherwise."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger(log.ROOT)
    level, handler = logger.level, Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


# Order and pipelining.


async def test_next_request_waits_for_the_response() -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(WAIT + GET + WAIT)
    await turns()
    assert server.events == ["start"]
    assert transport.sent == b""
    server.go.set()
    await turns()
    await turns()
    assert server.events == ["start", "end", "start", "end"]
    assert [part[-5:] for part in transport.sent.split(b"HTTP/1.1 ")[1:]] == [
        b"\ndone", b"hello", b"\ndone",
    ]  # fmt: skip


async def test_a_client_far_ahead_is_paused_and_resumed() -> None:
    server = Server(HttpLimits(backlog_bytes=100))
    connection, transport = server.connect()
    connection.data_received(WAIT + GET * 2)
    await turns()
    assert transport.reading
    connection.data_received(GET)
    assert not transport.reading
    server.go.set()
    await turns()
    await turns()
    assert transport.reading
    assert statuses(transport.sent) == [200, 200, 200, 200]


async def test_many_refusals_in_one_packet() -> None:
    """Responses that need no handler do not nest."""
    server = Server()
    connection, transport = server.connect()
    connection.data_received(GET.replace(b"hello", b"none") * 2000)
    assert statuses(transport.sent) == [404] * 2000


async def test_requests_wait_while_the_reader_is_behind() -> None:
    server = Server()
    connection, transport = server.connect()
    transport.blocked = True
    connection.data_received(GET + GET)
    await turns()
    assert transport.paused_writing
    assert statuses(transport.waiting) == [200]
    transport.blocked = False
    transport.take(10**6)
    await turns()
    assert statuses(transport.sent) == [200, 200]


# Limits.


async def test_body_limit_by_length() -> None:
    server = Server(HttpLimits(body_bytes=10))
    connection, transport = server.connect()
    connection.data_received(post(b"/echo", b"0123456789"))
    await turns()
    connection.data_received(post(b"/echo", b"0123456789a")[:-5])
    await turns()
    assert statuses(transport.sent) == [200, 413]
    assert transport.eof
    connection.data_received(b"6789a")  # what was on its way is dropped
    assert not transport.closing


async def test_body_limit_by_chunks() -> None:
    server = Server(HttpLimits(body_bytes=10))
    connection, transport = server.connect()
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.data_received(head + b"8\r\n01234567\r\n3\r\n")
    assert statuses(transport.sent) == [413]
    assert transport.eof


@pytest.mark.parametrize("size", [100, 5000])
async def test_head_limit(size: int) -> None:
    server = Server(HttpLimits(head_bytes=1000))
    connection, transport = server.connect()
    connection.data_received(b"GET /hello HTTP/1.1\r\nHost: localhost\r\nX: ")
    while not transport.eof:
        connection.data_received(b"a" * size)
    assert statuses(transport.sent) == [431]


async def test_head_limit_with_the_end_in_reach() -> None:
    server = Server(HttpLimits(head_bytes=1000))
    connection, transport = server.connect()
    connection.data_received(GET[:-2] + b"X: " + b"a" * 1000 + b"\r\n\r\n")
    assert statuses(transport.sent) == [431]


async def test_header_count_limit() -> None:
    server = Server(HttpLimits(head_lines=10))
    connection, transport = server.connect()
    connection.data_received(GET[:-2] + b"A: b\r\n" * 9 + b"\r\n")
    connection.data_received(GET[:-2] + b"A: b\r\n" * 10 + b"\r\n")
    await turns()
    assert statuses(transport.sent) == [200, 431]


async def test_trailer_limit() -> None:
    server = Server(HttpLimits(head_bytes=1000))
    connection, transport = server.connect()
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.data_received(head + b"0\r\n" + b"A: b\r\n" * 200)
    assert statuses(transport.sent) == [431]
    connection, transport = server.connect()
    connection.data_received(head + b"0\r\nA: " + b"b" * 2000)
    assert statuses(transport.sent) == [431]


async def test_too_many_requests_at_once() -> None:
    server = Server(HttpLimits(max_requests=1))
    first, _ = server.connect()
    second, transport = server.connect()
    first.data_received(post(b"/wait", b""))
    await turns()
    second.data_received(post(b"/echo", b"x") + GET)
    await turns()
    assert statuses(transport.sent) == [429, 200]
    assert b"retry-after: 1\r\n" in transport.sent
    server.go.set()
    await turns()
    second.data_received(post(b"/echo", b"x"))
    await turns()
    assert statuses(transport.sent) == [429, 200, 200]


async def test_too_many_connections() -> None:
    """The oldest idle one makes room; without one the new one is refused."""
    server = Server(HttpLimits(max_connections=2))
    busy, busy_transport = server.connect()
    busy.data_received(WAIT)
    await turns()
    _, idle = server.connect()
    third, third_transport = server.connect()
    await turns()
    assert idle.lost
    assert not idle.aborted
    third.data_received(WAIT)
    _, fourth = server.connect()
    await turns()
    assert fourth.aborted
    assert not busy_transport.lost
    assert not third_transport.lost
    gauge = server.metrics.gauge("connections_open", "")
    assert gauge.value == 2


# Expect: 100-continue.


async def test_expect_continue() -> None:
    server = Server()
    connection, transport = server.connect()
    data = post(b"/echo", b"abc", b"Expect: 100-Continue\r\n")
    connection.data_received(data[:-3])
    assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(data[-3:])
    await turns()
    assert statuses(transport.sent) == [100, 200]


async def test_expect_continue_of_a_refused_request() -> None:
    server = Server(HttpLimits(body_bytes=2))
    for path, status in ((b"/none", 404), (b"/echo", 413)):
        connection, transport = server.connect()
        connection.data_received(post(path, b"abc", b"Expect: 100-continue\r\n")[:-3])
        assert statuses(transport.sent) == [status]
        assert transport.eof


# Deadlines.


async def test_idle_timeout() -> None:
    server = Server(HttpLimits(idle_timeout_s=10))
    connection, transport = server.connect()
    await server.clock.advance(9)
    connection.data_received(GET)
    await turns()
    await server.clock.advance(9.9)
    assert not transport.closing
    await server.clock.advance(0.2)
    assert transport.lost
    assert statuses(transport.sent) == [200]
    assert not server.shared.connections


async def test_head_timeout_counts_from_its_first_byte() -> None:
    server = Server(HttpLimits(io_timeout_s=5, idle_timeout_s=100))
    connection, transport = server.connect()
    await server.clock.advance(50)
    for byte in GET[:4]:
        connection.data_received(bytes([byte]))
        await server.clock.advance(1.2)
    assert transport.sent == b""
    await server.clock.advance(0.3)
    assert statuses(transport.sent) == [408]
    assert transport.eof
    await server.clock.advance(3)
    assert transport.lost


async def test_second_head_has_its_own_time() -> None:
    server = Server(HttpLimits(io_timeout_s=5, idle_timeout_s=100))
    connection, transport = server.connect()
    connection.data_received(GET + GET[:5])
    await turns()
    await server.clock.advance(4)
    connection.data_received(GET[5:] + GET[:5])
    await turns()
    await server.clock.advance(4)
    assert statuses(transport.sent) == [200, 200]
    await server.clock.advance(1.1)
    assert statuses(transport.sent) == [200, 200, 408]


async def test_body_timeout_counts_from_its_last_byte() -> None:
    server = Server(HttpLimits(io_timeout_s=5))
    connection, transport = server.connect()
    data = post(b"/echo", b"abcdef")
    connection.data_received(data[:-6])
    for byte in data[-6:-1]:
        await server.clock.advance(4)
        connection.data_received(bytes([byte]))
    assert transport.sent == b""
    await server.clock.advance(5.1)
    assert statuses(transport.sent) == [408]
    assert transport.eof


async def test_no_deadline_while_a_handler_works() -> None:
    server = Server(HttpLimits(io_timeout_s=5, idle_timeout_s=5, write_timeout_s=5))
    connection, transport = server.connect()
    connection.data_received(WAIT)
    await turns()
    await server.clock.advance(1000)
    assert not transport.closing
    server.go.set()
    await turns()
    assert statuses(transport.sent) == [200]


async def test_no_deadlines_at_all() -> None:
    server = Server(HttpLimits(io_timeout_s=0, idle_timeout_s=0))
    connection, transport = server.connect()
    await server.clock.advance(10**6)
    connection.data_received(GET[:5])
    await server.clock.advance(10**6)
    connection.data_received(GET[5:])
    await turns()
    assert statuses(transport.sent) == [200]


async def test_one_timer_per_connection() -> None:
    server = Server()
    connection, _ = server.connect()
    for _ in range(50):
        connection.data_received(GET)
        await turns()
        await server.clock.advance(1)
    assert server.clock.armed == 1


# Slow readers.


async def test_writes_merge_while_the_reader_is_behind() -> None:
    server = Server()
    reply, transport = await start_stream(server)
    drains: list[bool] = []
    reply.on_drain(lambda: drains.append(reply.paused))
    transport.blocked = True
    reply.write(b"a" * (HIGH_WATER + 1))
    assert reply.paused
    for part in (b"b", b"c", b"d"):
        reply.write(part)
    assert len(transport.writes) == 1
    transport.blocked = False
    transport.take(10**6)
    assert transport.writes[1:] == [b"3\r\nbcd\r\n"]
    assert drains == [False]
    reply.finish()
    await turns()
    assert transport.sent.endswith(b"3\r\nbcd\r\n0\r\n\r\n")


async def test_no_drain_call_when_the_kept_part_fills_the_buffer_again() -> None:
    server = Server()
    reply, transport = await start_stream(server)
    drains: list[bool] = []
    reply.on_drain(lambda: drains.append(True))
    transport.blocked = True
    reply.write(b"a" * (HIGH_WATER + 1))
    reply.write(b"b" * (HIGH_WATER + 1))
    transport.take(len(transport.waiting))
    assert reply.paused
    assert drains == []
    transport.take(len(transport.waiting))
    assert not reply.paused
    assert drains == [True]
    reply.abort()
    await turns()


@pytest.mark.parametrize("last", [b"", b"e"])
async def test_finish_while_the_reader_is_behind(last: bytes) -> None:
    server = Server()
    reply, transport = await start_stream(server)
    transport.blocked = True
    reply.write(b"a" * (HIGH_WATER + 1))
    reply.write(b"bcd")
    reply.finish(last)
    assert reply.closed
    body = b"bcd" + last
    assert transport.waiting.endswith(b"%d\r\n%b\r\n0\r\n\r\n" % (len(body), body))


async def test_write_timeout_of_a_reader_that_takes_nothing() -> None:
    server = Server(HttpLimits(write_timeout_s=10))
    reply, transport = await start_stream(server)
    transport.blocked = True
    reply.write(b"a" * 1000)
    await server.clock.advance(9)
    transport.take(1)  # progress, however small
    await server.clock.advance(2)
    assert not transport.closing
    await server.clock.advance(10)
    assert transport.aborted
    assert server.events == ["gone", "end"]
    assert reply.lost


async def test_write_timeout_after_the_response() -> None:
    """A response that fits no longer in the system's buffers does not keep its connection."""
    server = Server(HttpLimits(write_timeout_s=10, idle_timeout_s=3))
    connection, transport = server.connect()
    transport.blocked = True
    connection.data_received(GET)
    await turns()
    assert transport.paused_writing
    await server.clock.advance(14)
    assert transport.aborted
    # The same below the high-water mark, where only the idle deadline is left.
    connection, transport = server.connect()
    connection.data_received(GET)
    await turns()
    transport.waiting = b"x"
    await server.clock.advance(4)
    assert transport.closing
    assert not transport.aborted
    await server.clock.advance(11)
    assert transport.aborted


async def test_slow_reader_of_a_last_response() -> None:
    server = Server(HttpLimits(write_timeout_s=10, linger_s=2))
    connection, transport = server.connect()
    transport.blocked = True
    connection.data_received(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    await turns()
    assert transport.eof
    await server.clock.advance(9)
    assert not transport.closing  # still within its time
    transport.take(transport.get_write_buffer_size() - 5)
    await server.clock.advance(9)
    assert not transport.closing
    await server.clock.advance(15)
    assert transport.aborted


# Clients that leave.


@pytest.mark.parametrize("writes", range(4))
async def test_client_lost_at_each_write(writes: int) -> None:
    server = Server()
    reply, transport = await start_stream(server)
    for _ in range(writes):
        reply.write(b"x")
    transport.lose(ConnectionResetError())
    reply.write(b"y")
    reply.finish()
    reply.abort()
    await turns()
    assert server.events == ["gone", "end"]
    assert len(transport.writes) == writes
    late: list[str] = []
    reply.on_close(lambda: late.append("called"))
    assert late == ["called"]
    assert server.shared.busy == 0


async def test_close_after_the_end_is_no_loss() -> None:
    server = Server()
    reply, transport = await start_stream(server)
    reply.finish(b"x")
    transport.lose()
    await turns()
    assert server.events == ["end"]
    assert not reply.lost
    reply.on_close(lambda: server.events.append("wrong"))
    assert server.events == ["end"]


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_answer_between_a_failed_write_and_the_news_of_it(more: bytes) -> None:
    """The loop closes the transport at the error and tells the connection a turn later."""
    server = Server()
    connection, transport = server.connect()
    connection.data_received(WAIT[:-2] + more + b"\r\n" + GET)
    await turns()
    transport.closing = True
    server.go.set()
    await turns()
    transport.lose(BrokenPipeError())
    await turns()
    assert transport.sent == b""
    assert server.events == ["start", "end"]
    assert server.shared.busy == 0


async def test_end_without_lingering() -> None:
    server = Server(HttpLimits(linger_s=0))
    connection, transport = server.connect()
    connection.data_received(b"junk\r\n")
    await turns()
    assert statuses(transport.sent) == [400]
    assert transport.lost


async def test_end_of_input_in_a_stream_is_a_loss() -> None:
    server = Server()
    _, transport = await start_stream(server)
    assert transport._protocol.eof_received() is False
    assert server.events == ["gone"]
    transport.close()  # what the loop does then
    await turns()


async def test_end_of_input_in_a_request() -> None:
    server = Server()
    for data in (b"", GET[:9], post(b"/echo", b"abc")[:-1]):
        connection, transport = server.connect()
        if data:
            connection.data_received(data)
        assert connection.eof_received() is False
        transport.close()
        await turns()
        assert transport.sent == b""
    assert not server.shared.connections


async def test_half_closed_client_gets_its_answer() -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(WAIT + GET)
    await turns()
    assert connection.eof_received() is True
    assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    await server.clock.advance(100)
    assert server.events == ["start"]
    server.go.set()
    await turns()
    assert statuses(transport.sent) == [100, 200, 100, 200]
    await turns()
    assert transport.lost
    assert server.clock.armed == 0


async def test_closed_client_is_found_before_the_answer() -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(WAIT)
    await turns()
    assert connection.eof_received() is True
    transport.socket.error = 32  # the reset that the interim response met
    await server.clock.advance(0.05)
    assert server.events == ["start", "gone", "end"]
    assert transport.lost
    assert server.clock.armed == 0


async def test_http_1_0_client_that_ends_its_input_has_left() -> None:
    server = Server()
    connection, _ = server.connect()
    connection.data_received(b"GET /wait HTTP/1.0\r\n\r\n")
    await turns()
    assert connection.eof_received() is False
    assert server.events == ["start", "gone"]
    connection.abort()
    await turns()


async def test_a_failing_close_callback_is_logged(logged: list[str]) -> None:
    server = Server()
    reply, transport = await start_stream(server)

    def fail() -> None:
        raise ValueError("of the callback")

    reply.on_close(fail)
    reply.on_close(lambda: server.events.append("also"))
    transport.lose()
    assert "of the callback" in logged[-1]
    assert server.events == ["gone", "also"]
    await turns()


async def test_cancelled_handler_aborts_its_stream() -> None:
    server = Server()
    _, transport = await start_stream(server)
    for task in list(server.shared.tasks):
        task.cancel()
    await turns()
    assert transport.lost
    assert transport.sent == b""


# Draining and logs.


async def test_draining_closes_with_the_response() -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(WAIT + GET)
    await turns()
    server.shared.draining = True
    server.go.set()
    await turns()
    assert statuses(transport.sent) == [200]
    assert b"connection: close\r\n" in transport.sent
    assert transport.eof
    assert connection.eof_received() is False


async def test_one_line_per_refusal(logged: list[str]) -> None:
    server = Server()
    connection, _ = server.connect()
    connection.data_received(GET.replace(b"hello", b"none") + GET)
    await turns()
    connection.data_received(b"junk\r\n")
    assert len(logged) == 2
    assert "refused id=req_" in logged[0]
    assert "method=GET path=/none status=404 code=not_found" in logged[0]
    assert "status=400 code=invalid_request" in logged[1]


async def test_details_of_a_bug_stay_here(logged: list[str]) -> None:
    server = Server()
    connection, transport = server.connect()
    connection.data_received(GET.replace(b"hello", b"bug"))
    await turns()
    assert statuses(transport.sent) == [500]
    assert b"secret" not in transport.sent
    assert "secret detail" in logged[-1]


async def test_failing_error_mapping_still_answers() -> None:
    server = Server()

    def fail(request: object, error: object) -> None:
        raise ValueError("mapping")

    server.router.on_error = fail  # type: ignore[assignment]
    connection, transport = server.connect()
    connection.data_received(GET.replace(b"hello", b"none"))
    assert plain(transport.sent).startswith(b"HTTP/1.1 404 ")


async def test_request_values() -> None:
    server = Server()
    connection, _ = server.connect()
    connection.data_received(post(b"/echo?x=1&y", b"{}", b"A: 1\r\nX-Request-Id: r\r\na:2\r\n"))
    await turns()
    (request,) = server.requests
    assert (request.method, request.path, request.query) == ("POST", "/echo", "x=1&y")
    assert request.headers["a"] == "1, 2"
    assert request.request_id == "r"
    assert (request.peer, request.local) == ("127.0.0.1:50000", "127.0.0.1")
    assert request.body == b"{}"


async def test_write_counts() -> None:
    """One write per part of a stream, one for a whole response."""
    server = Server()
    reply, transport = await start_stream(server)
    for _ in range(10):
        reply.write(b"part")
    reply.finish()
    await turns()
    assert len(transport.writes) == 11
    connection, transport = server.connect()
    connection.data_received(GET)
    await turns()
    assert len(transport.writes) == 1
