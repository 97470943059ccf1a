"""Literal exchanges: bytes that a client sends, bytes that it gets. Run on the mock transport whole
and in pieces, and over loopback."""

from __future__ import annotations

from dataclasses import dataclass

H = b"Host: localhost\r\n"
ID = b"x-request-id: NEW\r\n"
CLOSE = b"connection: close\r\n"


@dataclass(frozen=True)
class Exchange:
    """sent: from the client. got: to it, less dates. closed: whether the server then ends."""

    name: str
    sent: bytes
    got: bytes
    closed: bool = False


def ok(body: bytes, more: bytes = b"", kind: bytes = b"text/plain") -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n" + length
    return head + (more or ID) + b"\r\n" + body


def error(status: bytes, code: str, message: str, more: bytes = b"") -> bytes:
    body = b'{"error": {"message": "%b", "code": "%b"}}' % (message.encode(), code.encode())
    length = b"content-length: %d\r\n" % len(body)
    head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\n" + length
    return head + ID + more + b"\r\n" + body


def bad(message: str) -> bytes:
    return error(b"400 Bad Request", "invalid_request", message, CLOSE)


def not_http(reason: str) -> bytes:
    return bad(f"This is not HTTP/1.1: {reason}.")


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\n"
)
NOT_FOUND = error(b"404 Not Found", "not_found", "There is nothing at GET /none.")
HELLO = ok(b"hello")
CHUNKED = b"POST /echo HTTP/1.1\r\n" + H + b"Transfer-Encoding: chunked\r\n\r\n"
NO_SIZE = bad("The body has a chunk without a proper size line.")

EXCHANGES = [
    Exchange("get", b"GET /hello HTTP/1.1\r\n" + H + b"\r\n", HELLO),
    Exchange("get_query", b"GET /hello?a=b HTTP/1.1\r\n" + H + b"\r\n", HELLO),
    Exchange("get_absolute", b"GET http://localhost:1/hello?a HTTP/1.1\r\n" + H + b"\r\n", HELLO),
    Exchange("get_escaped", b"GET /%68ello HTTP/1.1\r\n" + H + b"\r\n", HELLO),
    Exchange("empty_lines_before", b"\r\n\r\nGET /hello HTTP/1.1\r\n" + H + b"\r\n", HELLO),
    Exchange("get_item", b"GET /items/a%2Fb/c?d HTTP/1.1\r\n" + H + b"\r\n", ok(b"a/b/c|d")),
    Exchange(
        "head",
        b"HEAD /hello HTTP/1.1\r\n" + H + b"\r\nGET /hello HTTP/1.1\r\n" + H + b"\r\n",
        HELLO[: -len(b"hello")] + HELLO,
    ),
    Exchange(
        "head_of_stream",
        b"HEAD /stream HTTP/1.1\r\n" + H + b"\r\nGET /hello HTTP/1.1\r\n" + H + b"\r\n",
        STREAM_HEAD + b"transfer-encoding: chunked\r\n" + ID + b"\r\n" + HELLO,
    ),
    Exchange(
        "request_id",
        b"GET /hello HTTP/1.1\r\n" + H + b"X-Request-Id:  my id \r\n\r\n",
        ok(b"hello", b"x-request-id: my id\r\n"),
    ),
    Exchange(
        "request_id_not_sane",
        b"GET /hello HTTP/1.1\r\n" + H + b"X-Request-Id: \xc3\xa4\r\n\r\n",
        HELLO,
    ),
    Exchange(
        "request_id_too_long",
        b"GET /hello HTTP/1.1\r\n" + H + b"X-Request-Id: " + b"a" * 257 + b"\r\n\r\n",
        HELLO,
    ),
    Exchange(
        "request_id_of_error",
        b"GET /none HTTP/1.1\r\n" + H + b"X-Request-Id: abc\r\n\r\n",
        NOT_FOUND.replace(b"NEW", b"abc"),
    ),
    Exchange(
        "request_id_of_broken_head",
        b"GET /hello HTTP/1.1\r\nX-Request-Id: abc\r\nContent-Length: x\r\n\r\n",
        not_http("Invalid character in Content-Length").replace(b"NEW", b"abc"),
        closed=True,
    ),
    Exchange(
        "post",
        b"POST /echo HTTP/1.1\r\n" + H + b"Content-Length: 5\r\n\r\nabcde",
        ok(b"abcde"),
    ),
    Exchange("post_empty", b"POST /echo HTTP/1.1\r\n" + H + b"\r\n", ok(b"")),
    Exchange(
        "chunked",
        CHUNKED + b"1\r\na\r\n0B ;x=y\r\nbcdefghijkl\r\n0\r\n\r\n",
        ok(b"abcdefghijkl"),
    ),
    Exchange(
        "chunked_trailers",
        CHUNKED
        + b"2;q\r\n\r\n\r\n0\r\nX-Sum: 1\r\nY: \r\n\r\nGET /hello HTTP/1.1\r\n"
        + H
        + b"\r\n",
        ok(b"\r\n") + HELLO,
    ),
    Exchange("chunk_size_junk", CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", NO_SIZE, closed=True),
    Exchange("chunk_size_sign", CHUNKED + b"+1\r\na\r\n0\r\n\r\n", NO_SIZE, closed=True),
    Exchange("chunk_size_empty", CHUNKED + b"\r\na\r\n0\r\n\r\n", NO_SIZE, closed=True),
    Exchange("chunk_bare_line_feed", CHUNKED + b"1\na\r\n0\r\n\r\n", NO_SIZE, closed=True),
    Exchange("chunk_size_huge", CHUNKED + b"1" * 17 + b"\r\n", NO_SIZE, closed=True),
    Exchange(
        "chunk_too_long",
        CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
        bad("A chunk of the body is longer than its size line says."),
        closed=True,
    ),
    Exchange(
        "chunk_line_endless",
        CHUNKED + b"0" * 1024,
        bad("A chunk size line of the body is too long."),
        closed=True,
    ),
    Exchange(
        "trailer_junk",
        CHUNKED + b"0\r\nno colon\r\n\r\n",
        bad("The body has a trailer that is not a header line."),
        closed=True,
    ),
    Exchange(
        "stream",
        b"GET /stream HTTP/1.1\r\n" + H + b"\r\n",
        STREAM_HEAD
        + b"transfer-encoding: chunked\r\n"
        + ID
        + b"\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n",
    ),
    Exchange(
        "stream_http_1_0",
        b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        STREAM_HEAD + ID + CLOSE + b"\r\nonetwo",
        closed=True,
    ),
    Exchange(
        "http_1_0",
        b"GET /hello HTTP/1.0\r\n\r\nGET /hello HTTP/1.0\r\n\r\n",
        ok(b"hello", ID + CLOSE),
        closed=True,
    ),
    Exchange(
        "http_1_0_keep_alive",
        b"GET /hello HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n" * 2,
        ok(b"hello", ID + b"connection: keep-alive\r\n") * 2,
    ),
    Exchange(
        "close",
        b"GET /hello HTTP/1.1\r\n" + H + b"Connection: x, Close\r\n\r\nGET /hello",
        ok(b"hello", ID + CLOSE),
        closed=True,
    ),
    Exchange(
        "pipeline",
        b"GET /hello HTTP/1.1\r\n"
        + H
        + b"\r\nPOST /echo HTTP/1.1\r\n"
        + H
        + b"Content-Length: 3\r\n\r\nabcGET /none HTTP/1.1\r\n"
        + H
        + b"\r\nGET /hello HTTP/1.1\r\n"
        + H
        + b"\r\n",
        HELLO + ok(b"abc") + NOT_FOUND + HELLO,
    ),
    Exchange(
        "upgrade_declined",
        b"POST /echo HTTP/1.1\r\n"
        + H
        + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        ok(b"abc"),
    ),
    Exchange(
        "expect_with_body",
        b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
        ok(b"a", ID + CLOSE),
        closed=True,
    ),
    Exchange(
        "refused_body_is_skipped",
        b"POST /none HTTP/1.1\r\n"
        + H
        + b"Content-Length: 30\r\n\r\nGET /hello HTTP/1.1\r\n\r\n1234567GET /hello HTTP/1.1\r\n"
        + H
        + b"\r\n",
        NOT_FOUND.replace(b"GET", b"POST").replace(b"length: 77", b"length: 78") + HELLO,
    ),
    Exchange(
        "two_lengths",
        b"GET /hello HTTP/1.1\r\n" + H + b"Content-Length: 46\r\nContent-Length: 0\r\n\r\n",
        not_http("Duplicate Content-Length"),
        closed=True,
    ),
    Exchange(
        "length_and_chunked",
        b"POST /echo HTTP/1.1\r\n" + H + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n",
        not_http("Transfer-Encoding can't be present with Content-Length"),
        closed=True,
    ),
    Exchange(
        "space_before_colon",
        b"POST /echo HTTP/1.1\r\n" + H + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\nX",
        not_http("Invalid header field char"),
        closed=True,
    ),
    Exchange(
        "unknown_coding",
        b"POST /echo HTTP/1.1\r\n" + H + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        bad("Of transfer encodings only `chunked` is known, in HTTP/1.1."),
        closed=True,
    ),
    Exchange(
        "two_hosts",
        b"GET /hello HTTP/1.1\r\n" + H + H + b"\r\n",
        bad("The request has more than one Host header."),
        closed=True,
    ),
    Exchange(
        "bare_line_feeds",
        b"GET /hello HTTP/1.1\nHost: localhost\n\n",
        not_http("Expected CRLF after version"),
        closed=True,
    ),
    Exchange(
        "folded_header",
        b"GET /hello HTTP/1.1\r\n" + H + b"A: b\r\n c\r\n\r\n",
        not_http("Unexpected whitespace after header value"),
        closed=True,
    ),
    Exchange(
        "tls",
        b"\x16\x03\x01\x02\x00\x01",
        not_http("Invalid method encountered"),
        closed=True,
    ),
    Exchange(
        "http_2",
        b"GET /hello HTTP/2.0\r\n" + H + b"\r\n",
        bad("HTTP/2.0 is not spoken here, HTTP/1.1 is."),
        closed=True,
    ),
    Exchange(
        "no_host",
        b"GET /hello HTTP/1.1\r\n\r\n",
        error(b"400 Bad Request", "invalid_request", "The request has no Host header."),
    ),
    Exchange(
        "raised",
        b"GET /error HTTP/1.1\r\n" + H + b"\r\n",
        error(b"400 Bad Request", "invalid_request", "no such thing"),
    ),
    Exchange(
        "bug",
        b"GET /bug HTTP/1.1\r\n" + H + b"\r\n",
        error(
            b"500 Internal Server Error",
            "internal_error",
            "The server failed; its log has the details.",
        ),
    ),
    Exchange(
        "forgotten",
        b"GET /forgets HTTP/1.1\r\n" + H + b"\r\n",
        error(
            b"500 Internal Server Error",
            "internal_error",
            "The server failed; its log has the details.",
        ),
    ),
    Exchange(
        "bug_in_stream",
        b"GET /bug_stream HTTP/1.1\r\n" + H + b"\r\n",
        STREAM_HEAD + b"transfer-encoding: chunked\r\n" + ID + b"\r\n3\r\none\r\n",
        closed=True,
    ),
    Exchange(
        "wrong_method",
        b"PUT /echo HTTP/1.1\r\n" + H + b"\r\n",
        error(
            b"405 Method Not Allowed",
            "method_not_allowed",
            "/echo takes OPTIONS, POST, not PUT.",
            b"allow: OPTIONS, POST\r\n",
        ),
    ),
]  # fmt: skip
