"""Responses over a slow or failing generation: signs of life, terminal events, closed sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kslserve.errors import EngineError, KslError, Unavailable
from tests.server.api_cases import events_of
from tests.server.serving import Server, script_settings, serving

BODY = json.dumps({"model": "m", "input": "hi", "stream": True})


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Server]:
    """A server whose model is silent for a while, says a word and goes on slowly."""
    output: dict[str, Any] = {
        "thinking": False, "chunks": ["one", *[" more"] * 400], "first_ms": 300, "delay_ms": 20,
    }  # fmt: skip
    with serving(script_settings(tmp_path, [output], context=2048, heartbeat_s=0.05)) as running:
        yield running


@contextlib.contextmanager
def open_stream(server: Server) -> Iterator[http.client.HTTPResponse]:
    address = server.app.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/responses", BODY, {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            yield response


def read_until(response: http.client.HTTPResponse, kind: str) -> list[Any]:
    """Events up to the first one of a type."""
    events: list[Any] = []
    while not events or events[-1]["type"] != kind:
        lines = [response.readline(), response.readline(), response.readline()]
        events += events_of(b"".join(lines).decode())
    return events


def cancel_with(server: Server, error: KslError) -> None:
    service = server.app.state.service
    assert service is not None
    server.call(lambda: service.cancel_all(error))


def test_signs_of_life(slow: Server) -> None:
    with open_stream(slow) as response:
        events = read_until(response, "response.output_text.delta")
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    beats = kinds.index("response.output_item.added") - 1
    assert beats >= 3
    assert set(kinds[1 : beats + 1]) == {"response.in_progress"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[beats]["response"]["id"] == events[0]["response"]["id"]


def test_a_fault_that_would_repeat_is_told(slow: Server) -> None:
    with open_stream(slow) as response:
        read_until(response, "response.output_text.delta")
        cancel_with(slow, EngineError("The engine tripped."))
        rest = events_of(response.read().decode())
    last = rest[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine tripped."}


def test_a_fault_that_a_retry_cures_closes_the_socket(slow: Server) -> None:
    with open_stream(slow) as response:
        read_until(response, "response.output_text.delta")
        cancel_with(slow, Unavailable("Later."))
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
