"""Requests captured from coding clients are accepted, and mean what the client meant."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from kslserve.api import responses
from kslserve.api.responses_request import ResponsesRequest
from kslserve.core.request import Role
from kslserve.core.sampling import SamplingParams

CLIENTS = Path(__file__).resolve().parents[2] / "data/clients"
FILES = sorted(
    path.name
    for path in CLIENTS.iterdir()
    if path.name.startswith("codex.") or ".responses." in path.name
)


def bodies(name: str) -> list[dict[str, Any]]:
    requests = json.loads(gzip.decompress((CLIENTS / name).read_bytes()))["requests"]
    return [request["body"] for request in requests]


def read(body: dict[str, Any]) -> ResponsesRequest:
    return responses.parse(orjson.dumps(body), SamplingParams())


def test_there_are_captures() -> None:
    assert len(FILES) == 11


@pytest.mark.parametrize("name", FILES)
def test_accepted(name: str) -> None:
    for body in bodies(name):
        request = read(body)
        assert request.stream
        assert (request.response_format is not None) is ("structured" in name)
        assert request.messages[0].role is Role.SYSTEM
        assert request.dropped == ()
        hosted = sum(tool["type"] == "web_search" for tool in body.get("tools", ()))
        members = sum(len(tool.get("tools", (0,))) for tool in body.get("tools", ()))
        if "lite" not in name:
            assert len(request.tools) == members - hosted


@pytest.mark.parametrize("name", FILES)
def test_history_only_grows(name: str) -> None:
    """Messages of one session: those of a request are the first ones of the next."""
    if name in ("codex.compact.json.gz", "codex.subagent.json.gz"):
        return  # other conversations
    requests = [read(body) for body in bodies(name)]
    for before, after in itertools.pairwise(requests):
        assert after.messages[: len(before.messages)] == before.messages
        assert after.tools == before.tools
        assert len(after.messages) > len(before.messages)


def test_lite_form() -> None:
    request = read(bodies("codex.lite.json.gz")[0])
    names = [tool.name for tool in request.tools]
    assert "exec" in names
    assert "spawn_agent" in names
    assert request.table.origin("exec").namespace == "functions"
    assert request.table.origin("spawn_agent").namespace == "collaboration"
    assert request.effort == "low"


def test_free_form_history() -> None:
    request = read(bodies("codex.freeform.json.gz")[2])
    calls = [call for message in request.messages for call in message.tool_calls]
    assert calls[0].name == "apply_patch"
    assert calls[0].arguments["input"].startswith("*** Begin Patch\n")
    assert [m.reasoning for m in request.messages if m.role is Role.ASSISTANT] == [
        "I should look at the project files first."
    ] * 2


def test_namespaced_history() -> None:
    request = read(bodies("codex.subagent.json.gz")[0])
    names = [call.name for message in request.messages for call in message.tool_calls]
    assert names == ["spawn_agent"]
