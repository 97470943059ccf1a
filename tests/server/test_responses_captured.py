"""Requests captured from coding clients that speak Responses: each is accepted, and a session's
prompts only grow."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kslserve.config import Settings
from kslserve.service.prepare import Prepared
from tests.server.api_cases import events_of, post
from tests.server.captured import capture_names, captured, prepared
from tests.server.serving import Server, serving

FILES = capture_names("codex.", ".responses.")
# Their requests belong to different conversations.
APART = ("codex.compact", "codex.subagent")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(engine="fake", context=65536, max_seqs=2)) as running:
        yield running


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
        assert usage["input_tokens"] == len(prepared(server, "responses", request["body"]).ids)


@pytest.mark.parametrize("name", [name for name in FILES if name not in APART])
def test_a_session_only_grows(server: Server, name: str) -> None:
    """The prompt of each request begins with the one before it, and goes on with its answer."""
    before: Prepared | None = None
    for request in captured(name):
        now = prepared(server, "responses", request["body"])
        if before is not None:
            assert now.text.startswith(before.text)
            assert now.ids[: len(before.ids)].tolist() == before.ids.tolist()
            answer = now.text[len(before.text) :].partition("<|im_end|>")[0]
            assert answer.startswith("I should look at the project files first.\n</think>")
        before = now


def test_what_the_model_reads(server: Server) -> None:
    lite = prepared(server, "responses", captured("codex.lite")[0]["body"]).text
    for name in ("exec", "wait", "sleep", "spawn_agent"):
        assert f'"name": "{name}"' in lite
    form = prepared(server, "responses", captured("codex.freeform")[2]["body"]).text
    assert '"name": "apply_patch"' in form
    assert '"name": "tool_search"' in form
    assert "web_search" not in form
    assert "<parameter=input>\n*** Begin Patch\n*** Add File: note.txt\n" in form
    image = prepared(server, "responses", captured("codex.image")[0]["body"]).text
    assert "[image omitted: this model reads text only]" in image
    child = prepared(server, "responses", captured("codex.subagent")[0]["body"]).text
    assert "<function=spawn_agent>" in child
