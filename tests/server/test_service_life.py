"""The whole server with a scripted model: cancellation, limits, heartbeats, slow readers,
faults."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kslserve.api.chat_encode import ChatEncoder
from kslserve.app import App
from kslserve.config import Settings
from kslserve.core.events import TextDelta
from kslserve.engine.fake import FakeEngine
from tests.server.api_cases import events_of, post
from tests.server.serving import Server, get_text, metric_of, script_settings, serving

SLOW = {
    "match": "slow",
    "chunks": ["tick "] * 2000,
    "end": "stop",
    "thinking": False,
    "delay_ms": 5,
}
MUTE = {"match": "mute", "chunks": ["late"], "end": "stop", "thinking": False, "first_ms": 300}
STUCK = {"match": "stuck", "chunks": ["late"], "end": "stop", "thinking": False, "first_ms": 700}
BIG = {"match": "big", "chunks": ["x" * 20_000] * 300, "end": "stop", "thinking": False}
QUICK = {"chunks": ["all ", "done"], "end": "stop", "thinking": False}
LIMIT_S = 20.0
DECODING = 'requests{state="decoding"}'
QUEUED = 'requests{state="queued"}'
Ask = Callable[..., "Client"]


def settings(folder: Path, **more: Any) -> Settings:
    return script_settings(folder, [SLOW, MUTE, STUCK, BIG, QUICK], context=4096, **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("script")
    limits = settings(folder, max_seqs=2, max_queue=0, heartbeat_s=0.1)
    with serving(limits) as running:
        yield running


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Makes clients, and closes those that a test leaves open."""
    made: list[Client] = []

    def make(server: Server, text: str, **fields: Any) -> Client:
        made.append(Client(server, text, **fields))
        return made[-1]

    yield make
    for client in made:
        client.close()


class Client:
    """One connection of its own, one request."""

    def __init__(self, server: Server, text: str, *, stream: bool = True, **fields: Any) -> None:
        address = server.app.address
        self.connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
        body = {
            "model": "m",
            "stream": stream,
            "messages": [{"role": "user", "content": text}],
            **fields,
        }
        self.connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    def frame(self) -> Any:
        """The next frame of the stream."""
        line = self.response.readline()
        assert self.response.readline() == b"\n"
        return json.loads(line.removeprefix(b"data: "))

    def rest(self) -> list[Any]:
        return events_of(self.response.read().decode())

    def error(self) -> Any:
        return json.loads(self.response.read())["error"]

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self.connection.close()


def until(condition: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.01)


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    )


def is_idle(server: Server) -> bool:
    assert server.app.state.service is not None
    snapshot = server.app.state.service.scheduler.snapshot()
    return snapshot.running == 0 and snapshot.blocks_free == snapshot.blocks_total


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(ask: Ask, server: Server, stream: bool) -> None:
    client = ask(server, "slow", stream=stream)
    if stream:
        assert client.frame()["choices"][0]["delta"]["role"] == "assistant"
        assert client.frame()["choices"][0]["delta"]["content"] == "tick "
    until(lambda: server.metric(DECODING) == 1)
    ends = 'generations_ended_total{reason="cancelled"}'
    before = ended(server, ends)
    client.close()
    until(lambda: server.metric(DECODING) == 0)
    until(lambda: is_idle(server))
    assert ended(server, ends) == before + 1
    assert server.metric("generations_live") == 0


def ended(server: Server, name: str) -> float:
    text = get_text(server.root + "/metrics")
    return metric_of(text, name) if f"kslserve_{name} " in text else 0.0


def test_a_full_queue_is_a_429(ask: Ask, server: Server) -> None:
    holders = [ask(server, "slow") for _ in range(2)]
    for holder in holders:
        holder.frame()
    refused = ask(server, "hi")
    assert refused.response.status == 429
    assert int(refused.response.headers["retry-after"]) >= 1
    assert refused.error()["code"] == "rate_limit_exceeded"
    for holder in holders:
        holder.close()
    until(lambda: is_idle(server))


def test_silence_is_filled_with_events(ask: Ask, server: Server) -> None:
    events = ask(server, "mute").rest()
    deltas = [e["choices"][0]["delta"] for e in events if isinstance(e, dict)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    beats = deltas.index({"content": "late"})
    assert beats >= 2
    assert all(delta == {} for delta in deltas[1:beats])
    assert text_of(events) == "late"


def test_a_slow_reader_holds_nothing_up(ask: Ask, server: Server) -> None:
    """The model ends while the client has read nothing; what waits is merged into few frames."""
    client = ask(server, "big")
    client.frame()
    client.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    until(lambda: server.metric("generations_live") == 0)
    client.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    events = client.rest()
    assert text_of(events) == "x" * 20_000 * 300
    assert events[-1] == "done"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len(events) < 300


def test_usage_and_ids(ask: Ask, server: Server) -> None:
    client = ask(server, "hi", stream=False)
    assert client.response.headers["x-request-id"]
    body = json.loads(client.response.read())
    assert body["usage"]["completion_tokens"] == 3
    client = ask(server, "hi", stream_options={"include_usage": True})
    events = client.rest()
    assert events[-2]["usage"] == body["usage"]


def test_health(server: Server) -> None:
    assert get_text(server.root + "/livez") == "ok\n"
    assert get_text(server.root + "/readyz") == "ok\n"
    health = json.loads(get_text(server.root + "/healthz"))
    assert health["status"] == "ready"
    assert health["context"] == 4096
    properties = ("chunked", "batch", "adopted_prompt", "adopted_generation", "speculation")
    assert health["equality"] == dict.fromkeys(properties, "bit")
    state = health["scheduler"]
    counts = ("slots_free", "slots_total", "slabs_free", "slabs_total")
    counts += ("blocks_free", "blocks_cached", "blocks_total", "queued", "running", "waves")
    assert all(state[name] >= 0 for name in counts)
    assert (state["slots_total"], state["running"], state["queued"]) == (2, 0, 0)
    tiers = {"device", "host", "host_bytes", "image_bytes", "disk", "disk_bytes", "path_bytes"}
    assert tiers <= state["cache"].keys()
    assert (state["last_error"], state["fatal"]) == (None, None)
    assert get_text(server.root + "/").startswith("kslserve ")
    assert get_text(server.root + "/api/hello") == ""


class Silent:
    """An engine that is busy for good: whoever calls it waits for ever."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the engine was called")


def test_health_is_told_without_the_engine(ask: Ask, tmp_path: Path) -> None:
    """While a wave hangs: its age grows, and neither health checks nor metrics wait for it."""
    with serving(settings(tmp_path, max_seqs=1)) as server:
        service = server.app.state.service
        assert service is not None
        first, second = ask(server, "stuck"), ask(server, "hi")
        until(lambda: server.metric(QUEUED) == 1)
        engine, scheduler = service.scheduler._engine, service.scheduler
        server.call(lambda: setattr(scheduler, "_engine", Silent()))
        ages = []
        for _ in range(2):
            health = json.loads(get_text(server.root + "/healthz"))["scheduler"]
            assert (health["in_flight"], health["running"], health["queued"]) == (True, 1, 1)
            ages.append(health["wave_age_s"])
            assert server.metric("engine_busy") == 1
            time.sleep(0.02)
        assert 0 < ages[0] < ages[1]
        server.call(lambda: setattr(scheduler, "_engine", engine))
        assert text_of(first.rest()) == "late"
        assert text_of(second.rest()) == "all done"


def test_the_last_error_is_told(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as server:
        engine = server.app.engine
        assert isinstance(engine, FakeEngine)
        server.call(lambda: engine.faults.refuse.add(engine.progress().submitted + 1))
        assert ask(server, "hi", stream=False).response.status == 500
        health = json.loads(get_text(server.root + "/healthz"))
        assert health["status"] == "ready"
        assert "Refused" in health["scheduler"]["last_error"]
        assert server.metric('scheduler_events_total{kind="admission_failure"}') == 1


def test_a_reader_that_takes_nothing_is_closed_and_its_work_ends(ask: Ask, tmp_path: Path) -> None:
    flood = {**BIG, "match": "flood", "chunks": ["x" * 50_000] * 400, "delay_ms": 5}
    limits = script_settings(tmp_path, [flood, QUICK], context=4096, write_timeout_s=0.2)
    with serving(limits) as server:
        client = ask(server, "flood")
        client.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.frame()
        until(lambda: server.metric("generations_live") == 0)
        assert server.metric('generations_ended_total{reason="cancelled"}') == 1
        until(lambda: is_idle(server))
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            client.response.read()
        assert text_of(ask(server, "hi").rest()) == "all done"


def test_waiting_too_long_is_a_503(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path, max_seqs=1, queue_timeout_s=0.2)) as server:
        holder = ask(server, "slow")
        holder.frame()
        for stream in (True, False):
            waiting = ask(server, "hi", stream=stream)
            assert waiting.response.status == 503
            assert waiting.response.headers["retry-after"]
            assert waiting.error()["code"] == "unavailable"
        holder.close()


def test_a_queued_stream_shows_life_and_is_cut_when_it_fails(ask: Ask, tmp_path: Path) -> None:
    """Its head is out by then, so the failure is a closed socket, which clients retry."""
    limits = settings(tmp_path, max_seqs=1, queue_timeout_s=0.5, heartbeat_s=0.1)
    with serving(limits) as server:
        holder = ask(server, "slow")
        holder.frame()
        waiting = ask(server, "hi")
        assert waiting.response.status == 200
        assert waiting.frame()["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert waiting.frame()["choices"][0]["delta"] == {}
        with pytest.raises(http.client.IncompleteRead):
            waiting.response.read()
        holder.close()


def test_a_client_that_leaves_the_queue(ask: Ask, tmp_path: Path) -> None:
    """Noticed at once, long before anything would be written to it."""
    with serving(settings(tmp_path, max_seqs=1)) as server:
        holder = ask(server, "slow")
        holder.frame()
        waiting = ask(server, "hi")
        until(lambda: server.metric(QUEUED) == 1)
        waiting.close()
        until(lambda: server.metric(QUEUED) == 0)
        assert server.metric(DECODING) == 1
        assert server.metric('requests_total{state="cancelled"}') == 1
        holder.close()


def test_a_queued_stream_has_one_role_chunk(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path, max_seqs=1, heartbeat_s=0.1)) as server:
        holder = ask(server, "slow")
        holder.frame()
        waiting = ask(server, "hi")
        assert waiting.response.status == 200
        holder.close()
        events = waiting.rest()
        roles = [e for e in events[:-1] if "role" in e["choices"][0]["delta"]]
        assert len(roles) == 1
        assert text_of(events) == "all done"


def test_a_request_that_is_too_old(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path, request_timeout_s=0.3)) as server:
        late = ask(server, "slow", stream=False)
        assert late.response.status == 504
        assert late.error()["code"] == "request_timeout"


def test_a_failed_engine(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as server:
        engine = server.app.engine
        assert isinstance(engine, FakeEngine)
        stream, whole = ask(server, "slow"), ask(server, "slow", stream=False)
        stream.frame()
        until(lambda: server.metric(DECODING) == 2)

        def poison() -> None:
            engine.faults.fatal.update(range(1, 100_000))

        server.call(poison)
        with pytest.raises(http.client.IncompleteRead):
            stream.response.read()
        assert whole.response.status == 503
        assert whole.error()["code"] == "unavailable"
        refused = ask(server, "hi")
        assert refused.response.status == 503
        with pytest.raises(urllib.error.HTTPError) as caught:
            get_text(server.root + "/readyz")
        caught.value.close()
        assert caught.value.code == 503
        assert get_text(server.root + "/livez") == "ok\n"


class Breaking:
    """The script's model until the answer's third token, which nothing can be sampled for."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def token(self, slot: Any, timeline: Any) -> int:
        token: int = self._model.token(slot, timeline)
        return -1 if slot.sampled == 2 else token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_fault_that_would_repeat_is_told(ask: Ask, tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as server:
        engine = server.app.engine
        assert isinstance(engine, FakeEngine)
        engine.state.model = Breaking(engine.state.model)
        whole = ask(server, "slow", stream=False)
        assert whole.response.status == 500
        assert whole.error()["code"] == "internal_error"
        events = ask(server, "slow").rest()
        assert text_of(events[:-1]) == "tick tick "
        assert events[-1]["error"]["code"] == "internal_error"
        assert ended(server, 'generations_ended_total{reason="internal_error"}') == 2


def test_a_fault_of_ours_ends_one_exchange_only(
    ask: Ask, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ChatEncoder.encode

    def broken(self: ChatEncoder, events: list[Any]) -> bytes:
        if any(isinstance(event, TextDelta) for event in events):
            raise ValueError("secret")
        return encode(self, events)

    with monkeypatch.context() as patched:
        patched.setattr(ChatEncoder, "encode", broken)
        events = ask(server, "slow").rest()
    assert "secret" not in json.dumps(events)
    assert events[-1]["error"]["code"] == "internal_error"
    until(lambda: is_idle(server))
    assert text_of(ask(server, "hi").rest()) == "all done"


@pytest.mark.parametrize("depth", [400, 505, 2000])
def test_nesting_breaks_nothing(server: Server, depth: int) -> None:
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    arguments = json.dumps('{"a":' * depth + "1" + "}" * depth)
    body = (
        '{"model":"m","max_tokens":2,"messages":[{"role":"user","content":"x"},{"role":"assistant",'
        f'"tool_calls":[{{"id":"1","function":{{"name":"f","arguments":{arguments}}}}}]}}],'
        f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]}}'
    )
    status, _, text = post(server, "/v1/chat/completions", body.encode())
    assert status in (200, 400), text


async def test_before_the_model_is_loaded(tmp_path: Path) -> None:
    app = App(Settings(port=0, watchdog_loop_s=0.0, model=str(tmp_path / "nothing")))
    await app.listen()

    def look(method: str, path: str) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection(app.address.host, app.address.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, b"{}" if method == "POST" else None)
            response = connection.getresponse()
            response.read()
            return response.status, response.headers["retry-after"]
        finally:
            connection.close()

    for method, path in [
        ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/readyz"),
        ("GET", "/v1/models/x"), ("POST", "/v1/messages"), ("GET", "/nothing"),
    ]:  # fmt: skip
        status, retry_after = await asyncio.to_thread(look, method, path)
        assert (path, status) == (path, 503)
        assert int(retry_after or 0) >= 1
    for path in ("/livez", "/healthz", "/metrics", "/"):
        assert await asyncio.to_thread(look, "GET", path) == (200, None)
    assert await app.stop() == 0


def test_without_uvloop(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with serving(settings(tmp_path)) as server:
        assert type(server.loop).__module__.startswith("asyncio.")
        assert text_of(ask(server, "hi").rest()) == "all done"
        leaver = ask(server, "slow")
        leaver.frame()
        leaver.close()
        until(lambda: is_idle(server))
