"""`python -m kslserve` as a process: start message, signals, exit statuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.serving import Process, get_text

SLOW = {
    "match": "slow",
    "chunks": ["tick "] * 100,
    "end": "stop",
    "thinking": False,
    "delay_ms": 10,
}
HANG = {"match": "hang", "chunks": ["x"], "end": "stop", "first_ms": 3_600_000}
QUICK = {"chunks": ["done"], "end": "stop", "thinking": False}


@contextlib.contextmanager
def process(*flags: str) -> Iterator[Process]:
    started = Process(*flags)
    try:
        yield started
    finally:
        started.kill()


def scripted(folder: Path) -> list[str]:
    path = folder / "script.json"
    path.write_text(json.dumps({"outputs": [SLOW, HANG, QUICK]}), encoding="utf-8")
    return ["--engine", "scripted", "--script", str(path)]


@contextlib.contextmanager
def chat(url: str, text: str, *, stream: bool = True) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}
    try:
        connection.request("POST", parts.path + "/chat/completions", json.dumps(body))
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def test_the_default_model_from_start_to_stop() -> None:
    with process("--context", "2048") as server:
        url = server.wait_ready()
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/v1")
        message = "\n".join(server.lines)
        for part in ("ksl-nano", "MTP head", "parameters", "weights", "KV", "per token", "greedy"):
            assert part in message
        assert "context   2048 tokens" in message
        with chat(url, "What is 2+2?", stream=False) as response:
            answer: Any = json.loads(response.read())
        assert "4" in answer["choices"][0]["message"]["content"]
        server.process.send_signal(signal.SIGTERM)
        status, out, errors = server.finish()
    assert (status, out) == (0, "")
    (line,) = [line for line in errors.splitlines() if " dialect=chat " in line]
    for field in ("id=req_", "status=200", "prompt=", "output=", "first_ms=", "end=stop"):
        assert field in line
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_live_stream_finish(tmp_path: Path, number: signal.Signals) -> None:
    with process(*scripted(tmp_path)) as server, chat(server.wait_ready(), "slow") as response:
        first = response.readline()
        server.process.send_signal(number)
        rest = response.read()
        assert server.finish()[0] == 0
    assert b"role" in first
    assert rest.count(b"tick") == 100
    assert rest.endswith(b"data: [DONE]\n\n")


def test_what_a_stop_refuses_and_closes(tmp_path: Path) -> None:
    """While a stream has its time: idle connections are closed, new ones refused, and requests that
    were under way are answered."""
    with process(*scripted(tmp_path)) as server, chat(server.wait_ready(), "slow") as response:
        response.readline()
        parts = urlsplit(server.url)
        address = parts.hostname or "", parts.port or 0
        idle = socket.create_connection(address, timeout=30)
        heads = {
            b"GET /readyz HTTP/1.1": b"",
            b"GET /livez HTTP/1.1": b"",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2": b"{}",
        }
        begun = []
        for head in heads:
            begun.append(socket.create_connection(address, timeout=30))
            begun[-1].sendall(head + b"\r\nHost: localhost\r\n")
        get_text(server.url.removesuffix("/v1") + "/livez")  # so all that came before was read
        server.process.send_signal(signal.SIGTERM)
        with idle:
            assert idle.recv(100) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        answers = []
        for connection, body in zip(begun, heads.values(), strict=True):
            with connection:
                connection.sendall(b"\r\n" + body)
                answers.append(connection.makefile("rb").read())
        for answer, status in zip(answers, (503, 200, 503), strict=True):
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer
            assert (b"\r\nretry-after: " in answer) == (status == 503)
        assert response.read().count(b"tick") == 100
        assert server.finish()[0] == 0


def test_a_stream_that_outlives_the_grace_is_cut(tmp_path: Path) -> None:
    with (
        process(*scripted(tmp_path), "--grace-s", "0") as server,
        chat(server.wait_ready(), "slow") as response,
    ):
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(http.client.IncompleteRead):
            response.read()
        assert server.finish()[0] == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with process(*scripted(tmp_path)) as server, chat(server.wait_ready(), "slow") as response:
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        # The socket closes first, so that a refused connection tells that the first one arrived.
        parts = urlsplit(server.url)
        with contextlib.suppress(ConnectionError):
            while True:
                socket.create_connection((parts.hostname or "", parts.port or 0)).close()
        server.process.send_signal(signal.SIGTERM)
        assert server.finish()[0] == 128 + signal.SIGTERM


def test_a_stalled_engine_ends_the_process(tmp_path: Path) -> None:
    with process(*scripted(tmp_path), "--watchdog-wave-s", "0.2") as server:
        with chat(server.wait_ready(), "hi") as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        with chat(server.url, "hang", stream=False) as response:
            assert response.status == 503
            assert json.loads(response.read())["error"]["code"] == "unavailable"
        status, _, errors = server.finish()
    assert status == 70
    assert "No wave has progressed" in errors


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.ksl"
    damaged.write_bytes(b"\x10\0\0\0\0\0\0\0not a header")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        trials = [
            (["--port", port], "in use"),
            (["--model", str(tmp_path / "none.ksl")], "none.ksl"),
            (["--model", str(damaged)], "damaged.ksl"),
            (["--engine", "scripted", "--script", str(tmp_path / "none.json")], "none.json"),
            (["--no-such-flag"], "no-such-flag"),
            (["--context", "1000000000"], "--context"),
        ]
        started = [Process(*flags) for flags, _ in trials]
        for server, (flags, part) in zip(started, trials, strict=True):
            status, _, errors = server.finish()
            assert (flags, status) == (flags, 2)
            (line,) = [x for x in errors.splitlines() if " INFO " not in x]
            assert line.startswith("kslserve: ")
            assert part in line


def test_while_the_model_loads(tmp_path: Path) -> None:
    """A script that nobody writes keeps the start waiting."""
    pipe = tmp_path / "script.json"
    os.mkfifo(pipe)
    with process("--engine", "scripted", "--script", str(pipe)) as server:
        root = server.wait_line("kslserve ").split()[-1]
        assert get_text(root + "/livez") == "ok\n"
        assert json.loads(get_text(root + "/healthz"))["status"] == "loading"
        with chat(root + "/v1", "hi") as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
        server.process.send_signal(signal.SIGTERM)
        assert server.finish()[0] == 0
