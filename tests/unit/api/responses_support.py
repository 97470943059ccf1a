"""Helpers of the Responses tests: bodies, and streams checked against the official library's
types."""

from __future__ import annotations

import json
from typing import Any

import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kslserve.api import responses
from kslserve.api.responses_encode import ResponsesCollector, ResponsesEncoder
from kslserve.api.responses_request import ResponsesRequest
from kslserve.core.events import Event, Finished
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import Usage

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LS: dict[str, Any] = {
    "type": "function",
    "name": "ls",
    "description": "list",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "find tools",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
}


def parse(**fields: Any) -> ResponsesRequest:
    return responses.parse(orjson.dumps({"model": "m", "input": "hi", **fields}), DEFAULTS)


def frames(data: bytes) -> list[dict[str, Any]]:
    """Events of a stream; their names, numbers and shapes are checked."""
    events = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n") if data else []:
        name, _, body = frame.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    return events


def stream(batches: list[list[Event]], **fields: Any) -> list[dict[str, Any]]:
    """All events of a response, numbered from 0 without a gap."""
    encoder = ResponsesEncoder(parse(**fields))
    encoder.attach(42, Usage())
    events = frames(b"".join(encoder.encode(batch) for batch in batches))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def collect(batches: list[list[Event]], **fields: Any) -> dict[str, Any]:
    """The whole body of a response."""
    collector = ResponsesCollector(parse(**fields))
    collector.attach(42, Usage())
    for batch in batches:
        terminal = collector.fold(batch)
    assert isinstance(terminal, Finished)
    body = json.loads(collector.body(terminal))
    Response.model_validate(body)
    return body
