"""Runs one case of kind `http` (tests/data/cases/http.json) against a server, with plain sockets.

It blocks, so a test whose server lives in the same process calls it from a thread. What the steps
mean is written in the cases themselves; a case that does not hold raises AssertionError.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Gauge = Callable[[str], float]
DEFAULT_WITHIN_MS = 20000


def run_case(
    case: Mapping[str, Any],
    address: tuple[str, int],
    placeholders: Mapping[str, str],
    gauge: Gauge,
    *,
    time_scale: float = 1.0,
) -> None:
    """Run the steps of `case` in order.

    placeholders: values by name; for each NAME with a value, NAME_LEN and NAME_HEX_LEN are made,
    and HOST when it is missing. gauge: the value of a metric, by its name without a prefix.
    time_scale: factor on the durations of waits, drips and silences, not on upper limits.
    """
    run = _Run(case, address, placeholders, gauge, time_scale)
    try:
        run.steps(case["steps"])
    finally:
        run.close()


class _Run:
    def __init__(
        self,
        case: Mapping[str, Any],
        address: tuple[str, int],
        placeholders: Mapping[str, str],
        gauge: Gauge,
        time_scale: float,
    ) -> None:
        self._address = address
        self._gauge = gauge
        self._scale = time_scale
        host, port = address
        self._names = {"HOST": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
        for name, value in placeholders.items():
            size = len(value.encode())
            self._names |= {name: value, f"{name}_LEN": str(size), f"{name}_HEX_LEN": f"{size:x}"}
        gauges = {step["gauge"] for step in case["steps"] if "gauge" in step}
        self._start = {name: gauge(name) for name in gauges}
        self._socket: socket.socket | None = None
        self._stream: _Stream | None = None
        self._heads: list[bool] = []  # of requests sent and not answered: is it a HEAD
        self._dripping = threading.Event()
        self._drip: threading.Thread | None = None

    def close(self) -> None:
        self._dripping.set()
        if self._drip is not None:
            self._drip.join()
        if self._socket is not None:
            self._socket.close()

    def steps(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            handler = next((name for name in step if hasattr(self, "step_" + name)), None)
            assert handler is not None, f"unknown step {step}"
            getattr(self, "step_" + handler)(step)

    def text(self, text: str) -> bytes:
        def value(match: re.Match[str]) -> str:
            return self._names[match[1]]

        return re.sub(r"\$\{(\w+)\}", value, text).encode()

    def number(self, value: Any, gauge: str = "") -> float:
        """A number, or a sum of numbers and placeholders."""
        if not isinstance(value, str):
            return float(value)
        if gauge:
            value = value.replace("${START}", str(self._start[gauge]))
        return sum(float(part) for part in self.text(value).split(b"+"))

    def stream(self) -> _Stream:
        if self._stream is None:
            self.step_connect({})
        assert self._stream is not None
        return self._stream

    def send(self, data: bytes) -> None:
        stream = self.stream()
        # The server may have refused and closed already; what it answered is looked at later.
        with contextlib.suppress(ConnectionError):
            stream.socket.sendall(data)

    def step_connect(self, step: dict[str, Any]) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.create_connection(self._address, timeout=60)
        self._stream = _Stream(self._socket)
        self._heads.clear()

    def step_send(self, step: dict[str, Any]) -> None:
        data = self.text(step["send"])
        self.stream()  # connecting forgets earlier requests
        # Bodies are JSON, so a method at the start of a request is not mistaken.
        for match in re.finditer(rb"(GET|HEAD|POST|OPTIONS) /\S* HTTP/1\.", data):
            self._heads.append(match[1] == b"HEAD")
        self.send(data)

    def step_send_repeat(self, step: dict[str, Any]) -> None:
        text, count = step["send_repeat"]
        self.send(text.encode() * count)

    def step_send_chunked(self, step: dict[str, Any]) -> None:
        spec = step["send_chunked"]
        body, size = self.text(spec["body"]), spec["chunk_size"]
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        wire = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        for at in range(0, len(wire), spec["packet_size"]):
            self.send(wire[at : at + spec["packet_size"]])

    def step_drip(self, step: dict[str, Any]) -> None:
        spec = step["drip"]
        self.send(self.text(spec["text"]))
        sock = self.stream().socket

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not self._dripping.wait(spec["every_ms"] / 1000 * self._scale):
                    sock.sendall(spec["then_repeat"].encode())

        self._drip = threading.Thread(target=drip)
        self._drip.start()

    def step_wait_ms(self, step: dict[str, Any]) -> None:
        time.sleep(step["wait_ms"] / 1000 * self._scale)

    def step_close(self, step: dict[str, Any]) -> None:
        self.stream().socket.close()
        self._socket = self._stream = None

    def step_reset(self, step: dict[str, Any]) -> None:
        linger = struct.pack("ii", 1, 0)  # closing then sends a reset
        self.stream().socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.step_close(step)

    def step_repeat(self, step: dict[str, Any]) -> None:
        for _ in range(step["repeat"]):
            self.steps(step["steps"])

    def step_expect_status(self, step: dict[str, Any]) -> None:
        stream = self.stream()
        stream.limit(self.number(step.get("within_ms", DEFAULT_WITHIN_MS)))
        head_only = self._heads.pop(0) if self._heads else False
        status, headers = stream.head()
        assert status in step["expect_status"], f"status {status}, not {step['expect_status']}"
        for name, condition in step.get("headers", {}).items():
            _check_header(name, headers.get(name), condition)
        assert "x-request-id" in headers
        if headers.get("content-type", "").startswith("text/event-stream") and not (
            step.get("complete") or "body_contains" in step
        ):
            return  # later steps look at the events
        body = b"" if head_only else stream.body(status, headers)
        if step.get("no_body"):
            assert not body
            assert not stream.arrived(0.05), "bytes after a response without a body"
        if "body_contains" in step:
            assert step["body_contains"].encode() in body

    def step_expect_closed(self, step: dict[str, Any]) -> None:
        stream = self.stream()
        stream.limit(self.number(step.get("within_ms", DEFAULT_WITHIN_MS)))
        rest = stream.rest()
        if "status_before" in step:
            allowed = step["status_before"]
            if not rest:
                assert None in allowed, "closed without a response"
                return
            match = re.match(rb"HTTP/1\.1 (\d+) ", rest)
            assert match is not None, rest[:200]
            assert int(match[1]) in allowed, f"status {int(match[1])}, not {allowed}"
            rest = rest[9:]
        if step.get("no_more_responses") or "status_before" in step:
            assert b"HTTP/1." not in rest, rest[:200]

    def step_expect_contains(self, step: dict[str, Any]) -> None:
        stream = self.stream()
        stream.limit(self.number(step.get("within_ms", DEFAULT_WITHIN_MS)))
        stream.until(step["expect_contains"].encode())

    def step_expect_bytes_every_ms(self, step: dict[str, Any]) -> None:
        stream = self.stream()
        silence_s = step["expect_bytes_every_ms"] / 1000 * self._scale
        end = time.monotonic() + step["for_ms"] / 1000 * self._scale
        while time.monotonic() < end:
            assert stream.arrived(silence_s), f"no byte for {silence_s} s"

    def step_gauge(self, step: dict[str, Any]) -> None:
        name, wanted = step["gauge"], self.number(step["value"], step["gauge"])
        holds = {"le": float.__le__, "ge": float.__ge__, "eq": float.__eq__}[step["op"]]
        end = time.monotonic() + step.get("within_ms", 0) / 1000
        while not holds(float(self._gauge(name)), wanted):
            value = self._gauge(name)
            assert time.monotonic() < end, f"{name} is {value}, not {step['op']} {wanted}"
            time.sleep(0.02)


class _Stream:
    """The receiving side of a socket, with what was received and not used yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._data = b""
        self._end = 0.0

    def limit(self, within_ms: float) -> None:
        """What follows must be there by then."""
        self._end = time.monotonic() + within_ms / 1000

    def _receive(self) -> bool:
        """Wait for more; False at the end of input."""
        left = self._end - time.monotonic()
        assert left > 0, f"nothing more came in time; last bytes: {self._data[-200:]!r}"
        self.socket.settimeout(left)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return True
        except ConnectionResetError:
            return False
        self._data += data
        return bool(data)

    def arrived(self, within_s: float) -> bool:
        """Whether any byte comes within that time."""
        self.socket.settimeout(within_s)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        self._data += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            assert self._receive(), f"closed before {mark!r}; last bytes: {self._data[-200:]!r}"
        found, _, self._data = self._data.partition(mark)
        return found + mark

    def take(self, size: int) -> bytes:
        while len(self._data) < size:
            assert self._receive(), "closed in the middle of a body"
        found, self._data = self._data[:size], self._data[size:]
        return found

    def rest(self) -> bytes:
        while self._receive():
            pass
        return self._data

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next final response."""
        while True:
            lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
            match = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", lines[0])
            assert match is not None, lines[0]
            if int(match[1]) >= 200:
                break
        headers = {}
        for line in filter(None, lines[1:]):
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"two {name} headers"
            headers[name.lower()] = value.strip()
        return int(match[1]), headers

    def body(self, status: int, headers: Mapping[str, str]) -> bytes:
        if status in (204, 304):
            return b""
        if headers.get("transfer-encoding") != "chunked":
            return self.take(int(headers["content-length"]))
        body = b""
        while size := int(self.until(b"\r\n"), 16):
            body += self.take(size)
            assert self.take(2) == b"\r\n"
        assert self.take(2) == b"\r\n"
        return body


def _check_header(name: str, value: str | None, condition: Mapping[str, Any]) -> None:
    assert value is not None, f"no header {name}"
    for op, wanted in condition.items():
        if op == "any_of":
            assert value in wanted, f"{name}: {value}"
        elif op == "starts_with":
            assert value.startswith(wanted), f"{name}: {value}"
        else:
            assert op == "covers", f"unknown condition {op}"
            names = {part.strip().lower() for part in value.split(",")}
            # A star stands for every name but this one.
            missing = {part.lower() for part in wanted} - names
            assert missing <= set() or ("*" in names and "authorization" not in missing), name
