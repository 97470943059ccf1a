"""core.Events -> bytes of a Chat Completions answer, streamed (ChatEncoder) or whole
(ChatCollector).

Both take the same events. The stream is `data:` frames only; every constant part of a frame is made
once per response, so that a delta costs one string escape and two joins.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from kslserve.api import dialect
from kslserve.api.merge import merge
from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    LogprobsDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import KslError

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.CANCELLED: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.WINDOW: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
_NO_FINISH = b'},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def logprob_entries(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            **_logprob(entry.token, entry.logprob),
            "top_logprobs": [_logprob(token, value) for token, _, value in entry.top],
        }
        for entry in entries
    ]


def _logprob(token: bytes, value: float) -> dict[str, Any]:
    return {
        "token": token.decode("utf-8", "replace"),
        "logprob": max(value, -9999.0),  # JSON has no infinity
        "bytes": list(token),
    }


class _Head:
    """What every object of one response repeats."""

    __slots__ = ("created", "fingerprint", "id", "model", "seed")

    def __init__(self, model: str, fingerprint: str) -> None:
        self.id = "chatcmpl-" + uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self.fingerprint = fingerprint
        self.seed: int | None = None

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def extension(self, usage: Usage) -> dict[str, Any]:
        return {"x_kslserve": dialect.extension(self.seed, usage)}


class ChatEncoder:
    """The stream of one response."""

    __slots__ = ("_begun", "_content", "_delta", "_head", "_include_usage")

    def __init__(self, model: str, fingerprint: str, *, include_usage: bool) -> None:
        self._head = _Head(model, fingerprint)
        self._include_usage = include_usage
        self._begun = False
        self._delta = (
            b"data: "
            + orjson.dumps(self._head.fields("chat.completion.chunk"))[:-1]
            + b',"choices":[{"index":0,"delta":{'
        )
        self._content = self._delta + b'"content":'

    def attach(self, seed: int, usage: Usage) -> None:
        self._head.seed = seed

    def encode(self, events: Sequence[Event]) -> bytes:
        """The frames of one batch of events, in order. A Failed event has none: what happens then
        depends on the connection."""
        if len(events) == 1:
            event = events[0]
            if type(event) is TextDelta:
                return self.text(event.text)
            if type(event) is ReasoningDelta:
                return self._reasoning(event)
        else:
            events = merge(events)
        frames: list[bytes] = []
        entries: tuple[TokenLogprob, ...] = ()
        for event in events:
            if isinstance(event, LogprobsDelta):
                entries += event.entries
                continue
            if entries:
                text = event.text if isinstance(event, TextDelta) else ""
                frames.append(self._with_logprobs(text, entries))
                entries = ()
                if isinstance(event, TextDelta):
                    continue
            frames.append(self._frame(event))
        if entries:
            frames.append(self._with_logprobs("", entries))
        return b"".join(frames)

    def text(self, text: str) -> bytes:
        """`encode` of one TextDelta."""
        return b"".join((self._content, orjson.dumps(text), _NO_FINISH))

    def _frame(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self.text(text)
            case ReasoningDelta():
                return self._reasoning(event)
            case ToolCallDelta(index, json):
                call = {"index": index, "function": {"arguments": json}}
                return self._calls(call)
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return self._calls(
                    {"index": index, "id": call_id, "type": "function", "function": function}
                )
            case Started():
                # The head may have gone out earlier, as the first sign of life of a queued request.
                begun, self._begun = self._begun, True
                role = self._delta + b'"role":"assistant","content":""' + _NO_FINISH
                return b"" if begun else role
            case Finished():
                return self._finish(event)
        return b""

    def heartbeat(self) -> bytes:
        """A chunk with an empty delta: clients count it as progress, unlike a comment line."""
        return self._delta + _NO_FINISH

    def error(self, error: KslError) -> bytes:
        return b"data: " + dialect.error_body(error) + b"\n\n"

    def _reasoning(self, event: ReasoningDelta) -> bytes:
        return self._delta + b'"reasoning_content":' + orjson.dumps(event.text) + _NO_FINISH

    def _calls(self, call: dict[str, Any]) -> bytes:
        return self._delta + b'"tool_calls":[' + orjson.dumps(call) + b"]" + _NO_FINISH

    def _with_logprobs(self, text: str, entries: tuple[TokenLogprob, ...]) -> bytes:
        logprobs = {"content": logprob_entries(entries), "refusal": None}
        return (
            self._content
            + orjson.dumps(text)
            + b'},"logprobs":'
            + orjson.dumps(logprobs)
            + b',"finish_reason":null}]}\n\n'
        )

    def _finish(self, event: Finished) -> bytes:
        head = self._head
        last = {
            **head.fields("chat.completion.chunk"),
            "choices": [{"index": 0, "delta": {}, "finish_reason": FINISH[event.reason]}],
            **head.extension(event.usage),
        }
        frames = b"data: " + orjson.dumps(last) + b"\n\n"
        if self._include_usage:
            counts = {
                **head.fields("chat.completion.chunk"),
                "choices": [],
                "usage": usage_object(event.usage),
            }
            frames += b"data: " + orjson.dumps(counts) + b"\n\n"
        return frames + DONE


class ChatCollector:
    """Folds the events of one response into its one body."""

    __slots__ = (
        "_arguments",
        "_calls",
        "_head",
        "_logprobs",
        "_reasoning",
        "_text",
        "_want_logprobs",
    )

    def __init__(self, model: str, fingerprint: str, *, logprobs: bool) -> None:
        self._head = _Head(model, fingerprint)
        self._want_logprobs = logprobs
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallStart] = []
        self._arguments: list[list[str]] = []
        self._logprobs: list[TokenLogprob] = []

    def attach(self, seed: int, usage: Usage) -> None:
        self._head.seed = seed

    def fold(self, events: Sequence[Event]) -> Finished | Failed | None:
        """Take a batch; returns its terminal event, if there is one."""
        for event in events:
            match event:
                case TextDelta(text):
                    self._text.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._calls.append(event)
                    self._arguments.append([])
                case ToolCallDelta(_, json):
                    self._arguments[-1].append(json)
                case LogprobsDelta(entries):
                    self._logprobs.extend(entries)
                case Finished() | Failed():
                    return event
        return None

    def body(self, finished: Finished) -> bytes:
        """The answer. content is null only beside tool calls, reasoning_content is left out when
        there was none."""
        text = "".join(self._text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(arguments)},
                }
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        logprobs = None
        if self._want_logprobs:
            logprobs = {"content": logprob_entries(self._logprobs), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": FINISH[finished.reason],
        }
        return orjson.dumps(
            {
                **self._head.fields("chat.completion"),
                "choices": [choice],
                "usage": usage_object(finished.usage),
                **self._head.extension(finished.usage),
            }
        )
