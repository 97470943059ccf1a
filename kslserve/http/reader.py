"""Reading requests: bytes in, one request at a time out. No I/O, no timers.

httptools parses each head; the body is framed here, by its length or by chunks, because the parser
does not say where a message ends and the next one must stay unread until this one is answered.
Whatever could be read in two ways (two lengths, a space before a colon, bare line feeds) is an
error, since a proxy in front may have read it the other way.
"""

from __future__ import annotations

import re

import httptools

from kslserve.errors import BodyTooLarge, HeadTooLarge, InvalidRequest, KslError
from kslserve.http.flow import HttpLimits
from kslserve.http.message import Request, sane_request_id

HEAD_END = b"\r\n\r\n"
CHUNK_LINE_MAX = 1024
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")


class Head:
    """Callbacks of the head parser, and what they collected."""

    __slots__ = ("_lines_max", "done", "error", "headers", "host_count", "line_count", "url")

    def __init__(self, lines_max: int) -> None:
        self._lines_max = lines_max
        self.url = b""
        self.headers: dict[str, str] = {}
        self.line_count = 0
        self.host_count = 0
        self.done = False
        self.error: KslError | None = None

    def on_url(self, data: bytes) -> None:
        self.url += data

    def on_header(self, name: bytes, value: bytes) -> None:
        self.line_count += 1
        if self.line_count > self._lines_max:
            self.error = HeadTooLarge(f"The request has more than {self._lines_max} header lines.")
            raise self.error
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").strip(" \t")
        if key == "host":
            self.host_count += 1
        known = self.headers.get(key)
        self.headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        self.done = True


class RequestReader:
    """`feed_head` until `request` is set, then `feed_body` until `complete`, then `take`.

    Both take the data and an offset and return the offset behind what they consumed. Both raise
    KslError for what cannot be read; the connection is then of no more use, and `request_id` still
    names the request. discard_body: set by the owner when the request is refused already.
    """

    __slots__ = (
        "_body", "_chunks", "_head", "_left", "_limits", "_parser", "_size", "_tail", "complete",
        "discard_body", "keep_alive", "length", "request",
    )  # fmt: skip

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        """Ready for the next request; drops the parser, which refers back to its callbacks."""
        self._head: Head | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._size = 0  # bytes of the head
        self._tail = b""  # its last bytes, since its end mark may come in two parts
        self._left = 0
        self._body: list[bytes] = []
        self._chunks: ChunkedBody | None = None
        self.length: int | None = 0  # bytes of the body, None for a chunked one
        self.request: Request | None = None
        self.keep_alive = False
        self.complete = False
        self.discard_body = False

    @property
    def idle(self) -> bool:
        """No byte of a request has arrived."""
        return self._size == 0

    @property
    def request_id(self) -> str:
        if self.request is not None:
            return self.request.request_id
        return sane_request_id(self._head.headers.get("x-request-id") if self._head else None)

    def feed_head(self, data: bytes, at: int) -> int:
        if self._parser is None:
            # Empty lines between requests are allowed.
            while at < len(data) and data[at] in b"\r\n":
                at += 1
            if at == len(data):
                return at
            self._head = Head(self._limits.head_lines)
            self._parser = httptools.HttpRequestParser(self._head)
        assert self._head is not None
        if self._tail:
            found = (self._tail + data[at : at + 3]).find(HEAD_END)
            end = at + found - len(self._tail) + 4 if found >= 0 else -1
        else:
            end = -1
        if end < 0:
            found = data.find(HEAD_END, at)
            end = found + 4 if found >= 0 else -1
        piece = data[at:] if end < 0 else data[at:end]
        self._size += len(piece)
        if self._size > self._limits.head_bytes:
            raise HeadTooLarge(f"The request head is over {self._limits.head_bytes} bytes.")
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # an offer, which is declined by answering in HTTP/1.1
        except httptools.HttpParserError as error:
            raise self._head.error or InvalidRequest(f"This is not HTTP/1.1: {error}.") from error
        if end < 0:
            if self._head.done:
                raise InvalidRequest("The request head has no proper end.")
            self._tail = (self._tail + piece[-3:])[-3:]
            return len(data)
        if not self._head.done:
            raise InvalidRequest("The request head has no proper end.")
        self._take_head(self._head, self._parser)
        return end

    def _take_head(self, head: Head, parser: httptools.HttpRequestParser) -> None:
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"HTTP/{version} is not spoken here, HTTP/1.1 is.")
        if head.host_count > 1:
            raise InvalidRequest("The request has more than one Host header.")
        target = head.url.decode("latin-1")
        if target[:7].lower() == "http://":
            # The form that proxies get. Its authority takes the place of the Host header.
            authority, slash, rest = target[7:].partition("/")
            authority, mark, query = authority.partition("?")
            head.headers["host"] = authority.rpartition("@")[2]
            target = slash + rest if slash else "/" + mark + query
        path, _, query = target.partition("#")[0].partition("?")
        tokens = head.headers.get("connection", "").lower().replace(" ", "").split(",")
        self.keep_alive = "close" not in tokens and (version == "1.1" or "keep-alive" in tokens)
        self._parser = None
        encoding = head.headers.get("transfer-encoding")
        if encoding is not None:
            if encoding.lower() != "chunked" or version == "1.0":
                raise InvalidRequest("Of transfer encodings only `chunked` is known, in HTTP/1.1.")
            self.length = None
            self._chunks = ChunkedBody(self._limits)
        else:
            self.length = self._left = int(head.headers.get("content-length", "0"))
            self.complete = self._left == 0
        self.request = Request(
            method=parser.get_method().decode("ascii"),
            path=path,
            query=query,
            headers=head.headers,
            body=b"",
            request_id=sane_request_id(head.headers.get("x-request-id")),
            version=version,
        )

    def feed_body(self, data: bytes, at: int) -> int:
        if self.complete:
            return at
        if self._chunks is not None:
            at = self._chunks.feed(data, at, keep=not self.discard_body)
            self.complete = self._chunks.done
            return at
        end = min(len(data), at + self._left)
        self._left -= end - at
        if not self.discard_body and end > at:
            self._body.append(data[at:end])
        self.complete = self._left == 0
        return end

    def take(self) -> Request:
        """The complete request, with its body. `reset` must follow before the next one."""
        request = self.request
        assert request is not None
        assert self.complete
        if self._chunks is not None:
            request.body = bytes(self._chunks.body)
        else:
            request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        return request


class ChunkedBody:
    """The chunked framing: size lines with ignored extensions, data, trailers that are dropped."""

    __slots__ = (
        "_after_data",
        "_left",
        "_limits",
        "_line",
        "_size",
        "_trailer_bytes",
        "body",
        "done",
    )

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._line = b""  # the beginning of a line that is not complete yet
        self._left = 0  # of the data of this chunk
        self._after_data = False  # the empty line behind the data comes next
        self._size = 0  # of the body until now
        self._trailer_bytes: int | None = None  # None before the last chunk
        self.body = bytearray()
        self.done = False

    def feed(self, data: bytes, at: int, *, keep: bool) -> int:
        """Consume from offset `at`; returns the offset behind. keep: whether to store the data."""
        while at < len(data) and not self.done:
            if self._left > 0:
                end = min(len(data), at + self._left)
                if keep:
                    self.body += data[at:end]
                self._left -= end - at
                self._after_data = self._left == 0
                at = end
                continue
            newline = data.find(b"\n", at, at + CHUNK_LINE_MAX)
            end = newline + 1 if newline >= 0 else min(len(data), at + CHUNK_LINE_MAX)
            self._line += data[at:end]
            at = end
            if newline >= 0:
                line, self._line = self._line, b""
                self._take_line(line)
            elif len(self._line) >= CHUNK_LINE_MAX and self._trailer_bytes is None:
                raise InvalidRequest("A chunk size line of the body is too long.")
            elif len(self._line) > self._limits.head_bytes:
                raise HeadTooLarge(f"The trailers are over {self._limits.head_bytes} bytes.")
        return at

    def _take_line(self, line: bytes) -> None:
        if self._trailer_bytes is not None:
            self._take_trailer(line)
        elif self._after_data:
            if line != b"\r\n":
                raise InvalidRequest("A chunk of the body is longer than its size line says.")
            self._after_data = False
        else:
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise InvalidRequest("The body has a chunk without a proper size line.")
            self._left = int(match[1], 16)
            self._size += self._left
            if self._size > self._limits.body_bytes:
                raise BodyTooLarge(f"The body is over {self._limits.body_bytes} bytes.")
            if self._left == 0:
                self._trailer_bytes = 0

    def _take_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.done = True
            return
        assert self._trailer_bytes is not None
        self._trailer_bytes += len(line)
        if self._trailer_bytes > self._limits.head_bytes:
            raise HeadTooLarge(f"The trailers are over {self._limits.head_bytes} bytes.")
        if _TRAILER.fullmatch(line) is None:
            raise InvalidRequest("The body has a trailer that is not a header line.")
