"""core.Events -> bytes of a Messages answer, streamed (MessagesEncoder) or whole
(MessagesCollector).

An answer is a list of content blocks, one after another: a run of reasoning, a run of text or one
call. A block begins with the first event that says something of its kind, so none is empty.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from kslserve.api import dialect
from kslserve.api.dialect import Headers, error_headers
from kslserve.api.merge import merge
from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import ContextLengthExceeded, KslError
from kslserve.http.message import Response

# Clients send it back with the reasoning that it belongs to, and look no further.
SIGNATURE = "kslserve"

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.CANCELLED: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.WINDOW: "model_context_window_exceeded",
    FinishReason.TOOL_CALLS: "tool_use",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def new_call_id() -> str:
    return "toolu_" + uuid.uuid4().hex[:24]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Clients add the three input counts."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def message_object(model: str) -> dict[str, Any]:
    return {
        "id": "msg_" + uuid.uuid4().hex[:24],
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def error_object(error: KslError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if isinstance(error, ContextLengthExceeded):
        # Clients match this text from start to end and then compact their history.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit_tokens} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: KslError, request_id: str) -> Response:
    body = orjson.dumps({**error_object(error), "request_id": request_id})
    return Response(error.status, error_headers(error) + id_headers(request_id), body)


def id_headers(request_id: str) -> Headers:
    """The name under which the vendor's libraries look for the id."""
    return (("request-id", request_id),)


def _frame(kind: bytes, fields: dict[str, Any]) -> bytes:
    """One event; its name is also the first field of its data."""
    return b'event: %b\ndata: {"type":"%b",%b\n\n' % (kind, kind, orjson.dumps(fields)[1:])


class MessagesEncoder:
    """The stream of one response. show_thinking: send reasoning."""

    __slots__ = ("_begun", "_block", "_delta", "_index", "_message", "_show_thinking", "_usage")

    def __init__(self, model: str, *, show_thinking: bool) -> None:
        self._message = message_object(model)
        self._show_thinking = show_thinking
        self._usage = Usage()
        self._begun = False
        self._index = -1
        # Class of the events that the open block takes; None between blocks.
        self._block: type[ReasoningDelta | TextDelta | ToolCallDelta] | None = None
        self._delta = b""  # the constant part of a delta of the open block

    def attach(self, seed: int, usage: Usage) -> None:
        self._usage = usage
        self._message["x_kslserve"] = dialect.extension(seed)

    def encode(self, events: Sequence[Event]) -> bytes:
        """The frames of one batch of events, in order. A Failed event has none: what happens then
        depends on the connection."""
        if len(events) == 1:
            event = events[0]
            if type(event) is TextDelta:
                return self.text(event.text)
        else:
            events = merge(events)
        return b"".join([self._frames(event) for event in events])

    def text(self, text: str) -> bytes:
        """`encode` of one TextDelta."""
        if self._block is TextDelta:
            return b"%b%b}}\n\n" % (self._delta, orjson.dumps(text))
        return self._frames(TextDelta(text))

    def heartbeat(self) -> bytes:
        return _PING

    def error(self, error: KslError) -> bytes:
        return _frame(b"error", {"error": error_object(error)["error"]})

    def _frames(self, event: Event) -> bytes:
        match event:
            case TextDelta(text) if text:
                head = self._enter(TextDelta, "text", {"type": "text", "text": ""})
                return head + self._delta + orjson.dumps(text) + b"}}\n\n"
            case ReasoningDelta(text) if text and self._show_thinking:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                head = self._enter(ReasoningDelta, "thinking", empty)
                return head + self._delta + orjson.dumps(text) + b"}}\n\n"
            case ToolCallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._leave() + self._enter(ToolCallDelta, "input_json", call)
            case ToolCallDelta(_, json):
                return self._delta + orjson.dumps(json) + b"}}\n\n"
            case ToolCallEnd():
                return self._leave()
            case Started():
                return self._start()
            case Finished():
                return self._leave() + self._finish(event)
        return b""

    def _start(self) -> bytes:
        """The head may have gone out earlier, as the first sign of life of a queued request."""
        if self._begun:
            return b""
        self._begun = True
        message = {**self._message, "usage": usage_object(self._usage)}
        return _frame(b"message_start", {"message": message}) + _PING

    def _enter(
        self,
        takes: type[ReasoningDelta | TextDelta | ToolCallDelta],
        kind: str,
        empty: dict[str, Any],
    ) -> bytes:
        """Open a block, unless one of its kind is open."""
        if self._block is takes:
            return b""
        left = self._leave()
        self._index += 1
        self._block = takes
        field = {"input_json": "partial_json"}.get(kind, kind)
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b_delta","%b":' % (self._index, kind.encode(), field.encode())
        )
        return left + _frame(b"content_block_start", {"index": self._index, "content_block": empty})

    def _leave(self) -> bytes:
        """Close the open block; reasoning is signed last."""
        if self._block is None:
            return b""
        signed = b""
        if self._block is ReasoningDelta:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _frame(b"content_block_delta", {"index": self._index, "delta": delta})
        self._block = None
        return signed + _frame(b"content_block_stop", {"index": self._index})

    def _finish(self, event: Finished) -> bytes:
        delta = {
            "stop_reason": _STOP_REASONS[event.reason],
            "stop_sequence": event.stop_string,
        }
        fields = {"delta": delta, "usage": usage_object(event.usage)}
        if event.usage.statistics is not None:
            seed = self._message["x_kslserve"]["seed"]
            fields["x_kslserve"] = dialect.extension(seed, event.usage)
        return _frame(b"message_delta", fields) + _STOP


class MessagesCollector:
    """Folds the events of one response into its one body. A call that was cut off is left out: its
    arguments are no object."""

    __slots__ = ("_arguments", "_call", "_content", "_message", "_show_thinking", "_texts")

    def __init__(self, model: str, *, show_thinking: bool) -> None:
        self._message = message_object(model)
        self._show_thinking = show_thinking
        self._content: list[dict[str, Any]] = []
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []  # of the call
        self._texts: list[str] = []  # of the block that is last

    def attach(self, seed: int, usage: Usage) -> None:
        self._message["x_kslserve"] = dialect.extension(seed)

    def fold(self, events: Sequence[Event]) -> Finished | Failed | None:
        """Take a batch; returns its terminal event, if there is one."""
        for event in events:
            match event:
                case TextDelta(text) if text:
                    self._append("text", text)
                case ReasoningDelta(text) if text and self._show_thinking:
                    self._append("thinking", text)
                case ToolCallStart():
                    self._call, self._arguments = event, []
                case ToolCallDelta(_, json):
                    self._arguments.append(json)
                case ToolCallEnd():
                    self._end_call()
                case Finished() | Failed():
                    return event
        return None

    def _append(self, kind: str, text: str) -> None:
        if not self._content or self._content[-1]["type"] != kind:
            self._texts = []
            block: dict[str, Any] = {"type": kind, kind: self._texts}
            if kind == "thinking":
                block["signature"] = SIGNATURE
            self._content.append(block)
        self._texts.append(text)

    def _end_call(self) -> None:
        assert self._call is not None
        arguments = orjson.loads("".join(self._arguments) or "{}")
        call = {"type": "tool_use", "id": self._call.call_id, "name": self._call.name}
        self._content.append({**call, "input": arguments})

    def body(self, finished: Finished) -> bytes:
        """The answer."""
        content = [
            {
                key: "".join(value) if isinstance(value, list) else value
                for key, value in block.items()
            }
            for block in self._content
        ]
        return orjson.dumps(
            {
                **self._message,
                "content": content,
                "stop_reason": _STOP_REASONS[finished.reason],
                "stop_sequence": finished.stop_string,
                "usage": usage_object(finished.usage),
                "x_kslserve": dialect.extension(
                    self._message.get("x_kslserve", {}).get("seed"), finished.usage
                ),
            }
        )
