"""Requests captured from coding clients that speak Responses: each is accepted, and a session's
prompts only grow."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kslserve.config import Settings
from kslserve.service.prepare import Prepared
from tests.server.api_cases import events_of, post, request_of
from tests.server.serving import Server, serving

CLIENTS = Path(__file__).resolve().parents[1] / "data/clients"
FILES = sorted(
    path.name.removesuffix(".json.gz")
    for path in CLIENTS.iterdir()
    if path.name.startswith("codex.") or ".responses." in path.name
)
# Their requests belong to different conversations.
APART = ("codex.compact", "codex.subagent")


def captured(name: str) -> list[dict[str, Any]]:
    data = gzip.decompress((CLIENTS / f"{name}.json.gz").read_bytes())
    requests: list[dict[str, Any]] = json.loads(data)["requests"]
    return requests


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(engine="fake", context=65536, max_seqs=2)) as running:
        yield running


def prepared(server: Server, body: dict[str, Any]) -> Prepared:
    service = server.app.state.service
    assert service is not None
    request = request_of("responses", json.dumps(body).encode(), service.model)
    return service.preparer.prepare_now(request)


def test_there_are_captures() -> None:
    assert len(FILES) == 11


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_refused(server: Server, name: str) -> None:
    for request in captured(name):
        assert request["path"] == "/v1/responses"
        body = {**request["body"], "max_output_tokens": 1}
        status, content_type, text = post(server, "/v1/responses", json.dumps(body).encode())
        assert (status, content_type) == (200, "text/event-stream"), text
        last = events_of(text)[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        usage = last["response"]["usage"]
        assert usage["input_tokens"] == len(prepared(server, request["body"]).ids)


@pytest.mark.parametrize("name", [name for name in FILES if name not in APART])
def test_a_session_only_grows(server: Server, name: str) -> None:
    """The prompt of each request begins with the one before it, and goes on with its answer."""
    before: Prepared | None = None
    for request in captured(name):
        now = prepared(server, request["body"])
        if before is not None:
            assert now.text.startswith(before.text)
            assert now.ids[: len(before.ids)].tolist() == before.ids.tolist()
            answer = now.text[len(before.text) :].partition("<|im_end|>")[0]
            assert answer.startswith("I should look at the project files first.\n</think>")
        before = now


def test_what_the_model_reads(server: Server) -> None:
    lite = prepared(server, captured("codex.lite")[0]["body"]).text
    for name in ("exec", "wait", "sleep", "spawn_agent"):
        assert f'"name": "{name}"' in lite
    form = prepared(server, captured("codex.freeform")[2]["body"]).text
    assert '"name": "apply_patch"' in form
    assert '"name": "tool_search"' in form
    assert "web_search" not in form
    assert "<parameter=input>\n*** Begin Patch\n*** Add File: note.txt\n" in form
    image = prepared(server, captured("codex.image")[0]["body"]).text
    assert "[image omitted: this model reads text only]" in image
    child = prepared(server, captured("codex.subagent")[0]["body"]).text
    assert "<function=spawn_agent>" in child
