"""Requests captured from coding clients: each is accepted, and a session's prompts only grow."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kslserve.config import Settings
from kslserve.service.prepare import Prepared
from tests.server.api_cases import post
from tests.server.captured import capture_names, captured, prepared
from tests.server.serving import Server, serving

FILES = capture_names("claude.", ".messages.")
# Requests of other conversations that run beside the main one.
ASIDE = {("claude.interactive", 0), ("claude.subagent", 1), ("claude.subagent", 2),
         ("opencode.messages", 0)}  # fmt: skip
# The client sends no reasoning back, so that the prompt's last token, the line break after the
# thinking tag, joins the next line break; the turn's own ids keep them apart.
NO_REASONING = ("copilot-cli.messages", "opencode.messages")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(engine="fake", context=65536, max_seqs=2)) as running:
        yield running


def test_there_are_captures() -> None:
    assert len(FILES) == 14


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_refused(server: Server, name: str) -> None:
    for request in captured(name):
        body = request["body"]
        if "max_tokens" in body:
            body["max_tokens"] = 1
        status, content_type, text = post(server, request["path"], json.dumps(body).encode())
        assert status == 200, text
        streamed = body.get("stream", False)
        assert content_type == ("text/event-stream" if streamed else "application/json")
        assert text.endswith('data: {"type":"message_stop"}\n\n') == streamed


@pytest.mark.parametrize("name", FILES)
def test_a_session_only_grows(server: Server, name: str) -> None:
    """The prompt of each request begins with the one before it, and goes on with its answer."""
    before: Prepared | None = None
    for index, request in enumerate(captured(name)):
        if (name, index) in ASIDE or request["path"].endswith("count_tokens?beta=true"):
            continue
        now = prepared(server, "messages", request["body"])
        if before is not None:
            assert now.text.startswith(before.text)
            shared = len(before.ids) - (name in NO_REASONING)
            assert now.ids[:shared].tolist() == before.ids[:shared].tolist()
            answer = now.text[len(before.text) :].partition("<|im_end|>")[0]
            echoed = [m for m in request["body"]["messages"] if m["role"] == "assistant"][-1]
            for block in echoed["content"]:
                for said in (block.get("text"), block.get("thinking"), block.get("name")):
                    assert said is None or said in answer
        before = now


def test_deferred_tools_move_nothing(server: Server) -> None:
    """A tool that was searched for is printed at its reference, not among the others."""
    requests = captured("claude.tool-search")
    first, second = (prepared(server, "messages", request["body"]) for request in requests[:2])
    assert '"name": "WebSearch"' not in first.text
    assert "DeferredToolPlaceholder" not in first.text
    tail = second.text[len(first.text) :]
    assert tail.count('<tool_response>\n{"type": "function", "function": {"name": "WebSearch"') == 1


def test_what_changes_for_no_reason_is_not_in_the_prompt(server: Server) -> None:
    body = captured("claude.messages")[2]["body"]
    assert json.dumps(body).count("cache_control") > 0
    text = prepared(server, "messages", body).text
    assert "x-anthropic-billing-header" not in text
    assert "cache_control" not in text
    assert "signature" not in text.lower()
    assert "Done" in prepared(server, "messages", captured("claude.interactive")[3]["body"]).text


def test_an_image_is_a_placeholder(server: Server) -> None:
    text = prepared(server, "messages", captured("claude.image")[0]["body"]).text
    assert text.count("[image omitted: this model reads text only]") == 1


def test_equal_requests_of_two_agents_are_equal_prompts(server: Server) -> None:
    one, other = (prepared(server, "messages", r["body"]) for r in captured("claude.subagent")[1:])
    assert one.ids.tolist() == other.ids.tolist()
