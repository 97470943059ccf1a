"""core.Events -> output items of a response, and the events that tell of them.

One item is open at a time. The same machine serves the stream and the whole body, so that both end
with equal items.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import orjson

from kslserve.api.chat_encode import logprob_entries
from kslserve.api.responses_calls import CallItem, Json, Wire, call_item, new_id
from kslserve.api.responses_reasoning import seal
from kslserve.api.responses_tools import ToolTable
from kslserve.core.events import (
    Event,
    LogprobsDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

COMPLETED = "completed"
INCOMPLETE = "incomplete"


class _Item(Protocol):
    """An open item. begun: it as it is announced. end: it as it is kept, after its last events."""

    def begin(self) -> tuple[Json, list[Wire]]: ...
    def end(self, status: str) -> tuple[Json, list[Wire]]: ...


class OutputItems:
    """items: the finished ones, by output index. logprobs: text carries log-probabilities."""

    __slots__ = ("_entries", "_logprobs", "_open", "_tools", "items")

    def __init__(self, tools: ToolTable, *, logprobs: bool = False) -> None:
        self.items: list[Json] = []
        self._tools = tools
        self._logprobs = logprobs
        self._open: _Item | None = None
        self._entries: tuple[TokenLogprob, ...] = ()

    def take(self, events: Iterable[Event]) -> list[Wire]:
        """Stream events of a batch; those that are not about items are passed over."""
        out: list[Wire] = []
        for event in events:
            match event:
                case TextDelta(text):
                    self._text(text, out)
                case ReasoningDelta(text):
                    item = self._open
                    if not isinstance(item, _Reasoning):
                        item = _Reasoning(self._next(out))
                        self._start(item, out)
                    out.append(item.delta(text))
                case ToolCallStart(_, call_id, name):
                    self._entries = ()  # of markup: calls carry none
                    index = self._next(out)
                    self._start(call_item(index, call_id, self._tools.origin(name)), out)
                case ToolCallDelta(_, json):
                    assert isinstance(self._open, CallItem)
                    out += self._open.delta(json)
                case ToolCallEnd():
                    self.close(COMPLETED, out)
                case LogprobsDelta(entries):
                    if self._logprobs:
                        self._entries += entries
        return out

    def go_on(self, text: str) -> bytes | None:
        """The common case: text after text. The JSON of the delta's place, or None where it takes
        more than a delta."""
        item = self._open
        if self._logprobs or not isinstance(item, _Message):
            return None
        item.take(text)
        return item.place_json

    def close(self, status: str, out: list[Wire]) -> None:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, _Message) and self._entries:
            out.append(item.delta("", self._take_entries()))
        done, wires = item.end(status)
        out += wires
        out.append(("response.output_item.done", {"output_index": len(self.items), "item": done}))
        self.items.append(done)

    def _text(self, text: str, out: list[Wire]) -> None:
        item = self._open
        if not isinstance(item, _Message):
            item = _Message(self._next(out))
            self._start(item, out)
        out.append(item.delta(text, self._take_entries()))

    def _take_entries(self) -> list[Json]:
        entries, self._entries = self._entries, ()
        return logprob_entries(entries) if entries else []

    def _next(self, out: list[Wire]) -> int:
        """Index of a new item, after what was open."""
        self.close(COMPLETED, out)
        return len(self.items)

    def _start(self, item: _Item, out: list[Wire]) -> None:
        self._open = item
        begun, wires = item.begin()
        out.append(("response.output_item.added", {"output_index": len(self.items), "item": begun}))
        out += wires


class _Message:
    def __init__(self, index: int) -> None:
        self._id = new_id("msg_")
        self._place: Json = {"item_id": self._id, "output_index": index, "content_index": 0}
        self.place_json = orjson.dumps(self._place)[1:-1]
        self._texts: list[str] = []
        self._entries: list[Json] = []

    def take(self, text: str) -> None:
        """More text, whose event somebody else makes."""
        self._texts.append(text)

    def begin(self) -> tuple[Json, list[Wire]]:
        part = ("response.content_part.added", {**self._place, "part": self._part("")})
        return self._item("in_progress", []), [part]

    def delta(self, text: str, entries: list[Json]) -> Wire:
        self._texts.append(text)
        self._entries += entries
        body = {**self._place, "delta": text, "logprobs": entries}
        return "response.output_text.delta", body

    def end(self, status: str) -> tuple[Json, list[Wire]]:
        text = "".join(self._texts)
        part = self._part(text)
        done = {**self._place, "text": text, "logprobs": self._entries}
        return self._item(status, [part]), [
            ("response.output_text.done", done),
            ("response.content_part.done", {**self._place, "part": part}),
        ]

    def _part(self, text: str) -> Json:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._entries),
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }


class _Reasoning:
    """Sent as a summary, which clients show and carry along. Nothing is left out of it."""

    def __init__(self, index: int) -> None:
        self._id = new_id("rs_")
        self._place: Json = {"item_id": self._id, "output_index": index, "summary_index": 0}
        self._texts: list[str] = []

    def begin(self) -> tuple[Json, list[Wire]]:
        part = {"type": "summary_text", "text": ""}
        return {"type": "reasoning", "id": self._id, "status": "in_progress", "summary": []}, [
            ("response.reasoning_summary_part.added", {**self._place, "part": part})
        ]

    def delta(self, text: str) -> Wire:
        self._texts.append(text)
        return "response.reasoning_summary_text.delta", {**self._place, "delta": text}

    def end(self, status: str) -> tuple[Json, list[Wire]]:
        text = "".join(self._texts)
        part = {"type": "summary_text", "text": text}
        item = {
            "type": "reasoning",
            "id": self._id,
            "status": status,
            "summary": [part],
            "encrypted_content": seal(text),
        }
        return item, [
            ("response.reasoning_summary_text.done", {**self._place, "text": text}),
            ("response.reasoning_summary_part.done", {**self._place, "part": part}),
        ]
