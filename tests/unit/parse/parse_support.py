"""Helpers of the parser tests: run a parser over pieces of text, and put its events together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kslserve.core.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.parse.stream import OutputParser


def spec(name: str, parameters: dict[str, Any] | None = None) -> ToolSpec:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    return ToolSpec(name, {"type": "function", "function": function}, parameters or {})


def strings(name: str, *parameters: str) -> ToolSpec:
    """A tool whose parameters are all strings."""
    return spec(
        name, {"type": "object", "properties": {key: {"type": "string"} for key in parameters}}
    )


def specs(tools: Iterable[dict[str, Any]]) -> tuple[ToolSpec, ...]:
    return tuple(
        spec(tool["function"]["name"], tool["function"].get("parameters")) for tool in tools
    )


@dataclass
class Call:
    index: int
    call_id: str
    name: str
    json: str = ""
    ended: bool = False


@dataclass
class Output:
    """Events, merged."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    merged: list[Event] = field(default_factory=list)

    def arguments(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.json)) for call in self.calls]


def collect(events: Iterable[Event]) -> Output:
    """Merge events; asserts that calls do not overlap and count up, and that no piece is empty."""
    output = Output()
    for event in events:
        current = output.calls[-1] if output.calls and not output.calls[-1].ended else None
        last = output.merged[-1] if output.merged else None
        match event:
            case ReasoningDelta(text):
                assert text
                assert current is None
                output.reasoning += text
                if isinstance(last, ReasoningDelta):
                    output.merged[-1] = ReasoningDelta(last.text + text)
                    continue
            case TextDelta(text):
                assert text
                assert current is None
                output.content += text
                if isinstance(last, TextDelta):
                    output.merged[-1] = TextDelta(last.text + text)
                    continue
            case ToolCallStart(index, call_id, name):
                assert current is None
                assert index == len(output.calls)
                output.calls.append(Call(index, call_id, name))
            case ToolCallDelta(index, fragment):
                assert fragment
                assert current is not None
                assert current.index == index
                current.json += fragment
                if isinstance(last, ToolCallDelta):
                    output.merged[-1] = ToolCallDelta(index, last.json + fragment)
                    continue
            case ToolCallEnd(index):
                assert current is not None
                assert current.index == index
                assert isinstance(strict(current.json), dict)
                current.ended = True
        output.merged.append(event)
    assert len({call.call_id for call in output.calls}) == len(output.calls)
    return output


def strict(text: str) -> Any:
    """Strict JSON without double keys."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    def constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=members, parse_constant=constant)


def parse(
    pieces: Sequence[str],
    tools: Sequence[ToolSpec] = (),
    *,
    thinking: bool = False,
    tools_enabled: bool = True,
    reason: FinishReason = FinishReason.STOP,
) -> Output:
    ids = itertools.count()
    parser = OutputParser(
        tools, thinking=thinking, tools_enabled=tools_enabled, make_id=lambda: f"call_{next(ids)}"
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(reason)
    output = collect(events)
    assert parser.saw_tool_call == bool(output.calls)
    return output


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` in pieces, cut at the places (taken modulo its length)."""
    marks = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(marks)]
