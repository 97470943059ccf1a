"""Requests captured from coding clients that speak Chat Completions: each is accepted, and a
session's prompts only grow."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kslserve.config import Settings
from kslserve.service.prepare import Prepared
from tests.server.api_cases import events_of, post
from tests.server.captured import capture_names, captured, prepared
from tests.server.serving import Server, serving

PATH = "/v1/chat/completions"
FILES = capture_names("qwen-code.", ".chat.")
ASIDE = {("opencode.chat", 0)}  # a request of its own beside the conversation
# No reasoning comes back, so that the last line break of the prompt joins the next one.
NO_REASONING = ("continue.chat",)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(engine="fake", context=65536, max_seqs=2)) as running:
        yield running


def test_there_are_captures() -> None:
    assert len(FILES) == 11


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_refused(server: Server, name: str) -> None:
    for request in captured(name):
        assert request["path"] == PATH
        body = {**request["body"], "max_tokens": 1, "max_completion_tokens": None}
        status, content_type, text = post(server, PATH, json.dumps(body).encode())
        assert status == 200, text
        if body.get("stream"):
            assert content_type == "text/event-stream"
            *_, last, end = events_of(text)
            assert end == "done"
        else:
            last = json.loads(text)
        if not body.get("stream") or body.get("stream_options"):
            asked = len(prepared(server, "chat", request["body"]).ids)
            assert last["usage"]["prompt_tokens"] == asked


@pytest.mark.parametrize("name", FILES)
def test_a_session_only_grows(server: Server, name: str) -> None:
    """The prompt of each request begins with the one before it."""
    before: Prepared | None = None
    for index, request in enumerate(captured(name)):
        if (name, index) in ASIDE:
            continue
        now = prepared(server, "chat", request["body"])
        if before is not None:
            assert now.text.startswith(before.text)
            shared = len(before.ids) - (name in NO_REASONING)
            assert now.ids[:shared].tolist() == before.ids[:shared].tolist()
        before = now
