"""An engine that fails under live requests: each hears of it in its dialect, and the process ends
for whoever supervises it."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kslserve.engine.cuda import device_present
from tests.server.serving import Process, get_text, metric_of

LONG = "word " * 1500
TURN = [{"role": "user", "content": "go on"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/messages": {"messages": TURN, "max_tokens": 4000},
    "/v1/responses": {"input": "go on"},
}


def post(server: Process, path: str, stream: bool) -> tuple[int, bytes, bool]:
    """(status, body as far as it came, whether the body is whole)."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    body = {"model": "m", "stream": stream, "x_kslserve_force": LONG, **REQUESTS[path]}
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        try:
            return response.status, response.read(), True
        except http.client.IncompleteRead as error:
            return response.status, error.partial, False
    finally:
        connection.close()


def error_type(path: str, body: bytes) -> str:
    """What the dialect calls the error; the body has no other shape."""
    answer = json.loads(body)
    if path == "/v1/messages":
        assert answer["type"] == "error"
    kind: str = answer["error"]["type"]
    assert answer["error"]["message"]
    return kind


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_failing_engine_ends_every_request_and_the_process(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not device_present():
        pytest.skip("no CUDA device, or no CUDA library")
    trigger = tmp_path / "fail"
    flags = ["--device", device, "--test-hooks", "--speculation", "off", "--context", "8192"]
    server = Process(*flags, program=("tests.server.faulty", str(trigger)))
    kinds = [(path, stream) for path in REQUESTS for stream in (False, True)]
    try:
        server.wait_ready()
        root = server.url.removesuffix("/v1")
        with ThreadPoolExecutor(len(kinds)) as pool:
            jobs = [pool.submit(post, server, *kind) for kind in kinds]
            while metric_of(get_text(root + "/metrics"), 'requests{state="decoding"}') < len(kinds):
                pass
            trigger.touch()
            found = dict(zip(kinds, (job.result() for job in jobs), strict=True))
        status, _, errors = server.finish()
    finally:
        server.kill()
    assert status == 70
    text = "A fault was asked for" if device == "cpu" else "The CUDA device failed while"
    assert text in errors
    assert "Traceback" not in errors
    for (path, stream), (code, body, whole) in found.items():
        if not stream:
            expected = "overloaded_error" if path == "/v1/messages" else "server_error"
            assert (code, whole, error_type(path, body)) == (503, True, expected), path
        else:
            # It had begun: a client repeats what breaks off.
            assert code == 200
            assert b"data:" in body
            assert not whole or b"error" in body.rsplit(b"data:", 1)[-1], path
