"""The Messages dialect on the wire: streams, silence, errors, thinking, against a scripted
model."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kslserve.config import Settings
from kslserve.engine.fake import FakeEngine
from tests.server.api_cases import events_of, request_of
from tests.server.serving import Server, get_text, metric_of, script_settings, serving

LIMIT_S = 20.0
SLOW = {
    "match": "slow", "chunks": ["tick "] * 2000, "end": "stop", "thinking": False, "delay_ms": 5,
}  # fmt: skip
MUTE = {"match": "mute", "chunks": ["late"], "end": "stop", "thinking": False, "first_ms": 300}
DEEP = {"match": "deep", "chunks": ["hm ", "so</think>\n\n", "42"], "end": "stop", "thinking": True}
QUICK = {"chunks": ["all ", "done"], "end": "stop", "thinking": False}


def settings(folder: Path, **more: Any) -> Settings:
    return script_settings(folder, [SLOW, MUTE, DEEP, QUICK], context=4096, **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("script")
    with serving(settings(folder, max_seqs=2, heartbeat_s=0.1)) as running:
        yield running


class Answer:
    """One request on a connection of its own. events: of a stream, else None."""

    def __init__(
        self,
        server: Server,
        body: Any,
        *,
        path: str = "/v1/messages?beta=true",
        method: str = "POST",
        **headers: str,
    ) -> None:
        address = server.app.address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
        try:
            data = None if body is None else json.dumps(body)
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json", **sent})
            response = connection.getresponse()
            self.status = response.status
            self.headers = response.headers
            self.text = response.read().decode()
        finally:
            connection.close()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        return events_of(self.text)


def say(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 2000, "messages": messages, **fields}


def kinds(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


def counter(server: Server, name: str) -> float:
    text = get_text(server.root + "/metrics")
    return metric_of(text, name) if f"kslserve_{name} " in text else 0.0


def test_a_stream(server: Server) -> None:
    answer = Answer(server, say("hi", stream=True), x_request_id="mine-1")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine-1"
    events = answer.events
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds(events)[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds(events)[-3:] == ends
    start, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert start["input_tokens"] == last["input_tokens"] > 0
    assert (start["output_tokens"], last["output_tokens"]) == (0, 3)
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == "all done"


def test_silence_is_filled_with_pings(server: Server) -> None:
    events = Answer(server, say("mute", stream=True)).events
    begin = kinds(events).index("content_block_start")
    assert begin >= 4
    assert kinds(events)[1:begin] == ["ping"] * (begin - 1)


@pytest.mark.parametrize(
    ("default", "text", "wanted"),
    [
        ("off", "hi", ["text"]),
        ("hidden", "deep", ["text"]),
        ("on", "deep", ["thinking", "text"]),
    ],
)
def test_requests_that_say_nothing_about_thinking(
    default: str, text: str, wanted: list[str], tmp_path: Path
) -> None:
    with serving(settings(tmp_path, messages_default_thinking=default)) as server:
        whole = Answer(server, say(text)).json
        assert [block["type"] for block in whole["content"]] == wanted
        assert whole["content"][-1]["text"] == ("42" if text == "deep" else "all done")
        thought = whole["usage"]["output_tokens_details"]["thinking_tokens"]
        assert (thought > 0) == (default != "off")
        if wanted[0] == "thinking":
            assert whole["content"][0]["thinking"] == "hm so"
        events = Answer(server, say(text, stream=True)).events
        begun = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert begun == wanted
        asked = Answer(server, say("deep", thinking={"type": "adaptive", "display": "omitted"}))
        assert [block["type"] for block in asked.json["content"]] == ["thinking", "text"]


def test_hidden_reasoning_comes_back_into_the_prompt(server: Server) -> None:
    """The turn is known by what was said, and goes on from the ids that were generated."""
    service = server.app.state.service
    assert service is not None
    tokenizer = service.preparer._tokenizer

    def prompt(content: Any) -> bytes:
        history = [
            {"role": "user", "content": "deep"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "again"},
        ]
        body = {"model": "m", "max_tokens": 5, "messages": history}
        request = request_of("messages", json.dumps(body).encode(), service.model)
        ids = service.preparer.prepare_now(request).ids.tolist()
        count = Answer(server, body, path="/v1/messages/count_tokens")
        assert count.json == {"input_tokens": len(ids)}
        assert count.headers["request-id"] == count.headers["x-request-id"]
        return b"".join(tokenizer.token_bytes(token) for token in ids)

    (said,) = Answer(server, say("deep")).json["content"]
    assert said == {"type": "text", "text": "42"}
    assert b"hm so</think>\n\n42<|im_end|>" in prompt([said])
    assert b"hm so" not in prompt([{"type": "text", "text": "43"}])


def test_unknown_blocks_are_counted(server: Server) -> None:
    before = counter(server, "content_blocks_dropped_total")
    body = say("hi")
    body["messages"].append({"role": "user", "content": [{"type": "hologram"}]})
    assert Answer(server, body, path="/v1/messages/count_tokens").status == 200
    assert Answer(server, body).status == 200
    assert counter(server, "content_blocks_dropped_total") == before + 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("HEAD", "/v1/messages", 405, ""),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/x", 404, "not_found_error"),
    ],
)
def test_wrong_paths_and_methods(
    server: Server, method: str, path: str, status: int, kind: str
) -> None:
    answer = Answer(server, None, method=method, path=path, x_request_id="mine-2")
    assert answer.status == status
    if status == 405:
        assert answer.headers["allow"] == "OPTIONS, POST"
    if method != "HEAD":
        body = answer.json
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["message"]
        assert body["request_id"] == answer.headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_broken_body(server: Server, path: str) -> None:
    answer = Answer(server, [1], path=path)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["request_id"].startswith("req_")


def test_probes(server: Server) -> None:
    for method, path in [("HEAD", "/api/hello"), ("HEAD", "/"), ("GET", "/")]:
        assert Answer(server, None, method=method, path=path).status == 200


def test_keys(tmp_path: Path) -> None:
    with serving(settings(tmp_path, api_key=("secret",))) as server:
        refused = Answer(server, say("hi"), x_api_key="wrong")
        assert refused.status == 401
        assert refused.json["error"]["type"] == "authentication_error"
        assert Answer(server, say("hi"), x_api_key="secret").status == 200
        assert Answer(server, say("hi"), authorization="Bearer secret").status == 200
        count = Answer(server, say("hi"), path="/v1/messages/count_tokens", x_api_key="secret")
        assert count.status == 200
        foreign = Answer(server, say("hi"), origin="http://evil.example", x_api_key="secret")
        assert foreign.status == 403
        assert foreign.json["error"]["type"] == "permission_error"


def test_before_the_model_is_loaded_and_after(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as server:
        state = server.app.state
        service = state.service
        server.call(lambda: setattr(state, "service", None))
        answer = Answer(server, say("hi"))
        assert answer.status == 503
        assert answer.json["error"]["type"] == "overloaded_error"
        assert int(answer.headers["retry-after"]) >= 1
        server.call(lambda: setattr(state, "service", service))


class Breaking:
    """The script's model until the answer's third token, which nothing can be sampled for."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def token(self, slot: Any, timeline: Any) -> int:
        token: int = self._model.token(slot, timeline)
        return -1 if slot.sampled == 2 else token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_fault_that_would_repeat_is_told(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as server:
        engine = server.app.engine
        assert isinstance(engine, FakeEngine)
        engine.state.model = Breaking(engine.state.model)
        whole = Answer(server, say("slow"))
        assert whole.status == 500
        assert whole.json["error"]["type"] == "api_error"
        events = Answer(server, say("slow", stream=True)).events
        assert events[0]["type"] == "message_start"
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


def test_a_fault_that_a_retry_may_cure_cuts_the_stream(tmp_path: Path) -> None:
    limits = settings(tmp_path, max_seqs=1, queue_timeout_s=0.3, heartbeat_s=0.1)
    with serving(limits) as server:
        address = server.app.address
        holder = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
        try:
            holder.request("POST", "/v1/messages", json.dumps(say("slow", stream=True)))
            holder.getresponse().readline()
            with pytest.raises(http.client.IncompleteRead) as caught:
                Answer(server, say("hi", stream=True))
        finally:
            holder.close()
        events = events_of(caught.value.partial.decode())
        assert events[0]["type"] == "message_start"
        assert set(kinds(events[1:])) == {"ping"}


def test_leaving_early_is_a_cancellation(server: Server) -> None:
    name = 'generations_ended_total{reason="cancelled"}'
    before = counter(server, name)
    with (
        anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0) as client,
        client.messages.stream(**say("slow")) as events,
    ):
        assert next(iter(events)).type == "message_start"
    end = time.monotonic() + LIMIT_S
    while counter(server, name) == before:
        assert time.monotonic() < end, "nobody noticed"
        time.sleep(0.01)
    assert counter(server, name) == before + 1
