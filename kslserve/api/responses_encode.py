"""core.Events -> bytes of a Responses answer, streamed (ResponsesEncoder) or whole
(ResponsesCollector).

Every event of the stream is named like its `type` and numbered from 0. The response object that
goes out with the first events, with heartbeats and with the last event is one object with another
status.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from kslserve.api import dialect
from kslserve.api.merge import merge
from kslserve.api.responses_calls import Wire
from kslserve.api.responses_output import COMPLETED, INCOMPLETE, OutputItems
from kslserve.api.responses_request import ResponsesRequest
from kslserve.core.events import Event, Failed, Finished, Started, TextDelta
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import ContextLengthExceeded, InvalidRequest, KslError
from kslserve.http.sse import frame

_CUT = (FinishReason.LENGTH, FinishReason.WINDOW)
_RESPONSE = "response."
_TEXT = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":%d,%b,"delta":%b,"logprobs":[]}'
    b"\n\n"
)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


class _Response:
    """The response object of one request, at any moment of it."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._fields: dict[str, Any] = {
            "id": "resp_" + uuid.uuid4().hex,
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            **request.echo,
        }
        self._seed: int | None = None
        self.items = OutputItems(request.table, logprobs=request.sampling.logprobs is not None)

    def attach(self, seed: int, usage: Usage) -> None:
        self._seed = seed

    def body(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "x_kslserve": dialect.extension(self._seed),
            **more,
        }

    def finished(self, event: Finished) -> tuple[list[Wire], dict[str, Any]]:
        """The events that end the last item, and the response object of the end."""
        status = INCOMPLETE if event.reason in _CUT else COMPLETED
        wires: list[Wire] = []
        self.items.close(status, wires)
        more: dict[str, Any] = {
            "output": self.items.items,
            "usage": usage_object(event.usage),
            "x_kslserve": dialect.extension(self._seed, event.usage),
        }
        if status == INCOMPLETE:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = int(time.time())
        return wires, self.body(status, **more)


class ResponsesEncoder:
    """The stream of one response."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._response = _Response(request)
        self._begun = False
        self._number = 0

    def attach(self, seed: int, usage: Usage) -> None:
        self._response.attach(seed, usage)

    def encode(self, events: Sequence[Event]) -> bytes:
        """The frames of one batch of events, in order. A Failed event has none: what happens then
        depends on the connection."""
        if len(events) == 1:
            event = events[0]
            if type(event) is TextDelta:
                return self.text(event.text)
        return self._frames(events)

    def text(self, text: str) -> bytes:
        """`encode` of one TextDelta."""
        place = self._response.items.go_on(text)
        if place is None:
            return self._frames([TextDelta(text)])
        number = self._number
        self._number = number + 1
        return _TEXT % (number, place, orjson.dumps(text))

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames: list[bytes] = []
        if isinstance(events[0], Started):
            frames.append(self._head())
        last = events[-1]
        items = self._response.items
        frames += [self._frame(*wire) for wire in items.take(merge(events))]
        if isinstance(last, Finished):
            wires, body = self._response.finished(last)
            frames += [self._frame(*wire) for wire in wires]
            frames.append(self._state(str(body["status"]), body))
        return b"".join(frames)

    def heartbeat(self) -> bytes:
        """The response is in progress, once more: clients count it as progress, unlike a comment
        line."""
        return self._state("in_progress", self._response.body("in_progress"))

    def error(self, error: KslError) -> bytes:
        """The terminal event of a fault that would repeat."""
        body = self._response.body(
            "failed",
            output=self._response.items.items,
            error={"code": _error_code(error), "message": str(error)},
        )
        return self._state("failed", body)

    def _head(self) -> bytes:
        # It may have gone out earlier, as the first sign of life of a queued request.
        if self._begun:
            return b""
        self._begun = True
        body = self._response.body("in_progress")
        return self._state("created", body) + self._state("in_progress", body)

    def _state(self, name: str, body: dict[str, Any]) -> bytes:
        return self._frame(_RESPONSE + name, {"response": body})

    def _frame(self, kind: str, body: dict[str, Any]) -> bytes:
        number = self._number
        self._number = number + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **body})
        return frame(data, kind.encode())


def _error_code(error: KslError) -> str:
    """Codes that clients know. The one for an overloaded server is none of them: it would end the
    task."""
    if isinstance(error, ContextLengthExceeded):
        return error.code
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


class ResponsesCollector:
    """Folds the events of one response into its one body."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._response = _Response(request)

    def attach(self, seed: int, usage: Usage) -> None:
        self._response.attach(seed, usage)

    def fold(self, events: Sequence[Event]) -> Finished | Failed | None:
        """Take a batch; returns its terminal event, if there is one."""
        self._response.items.take(events)
        last = events[-1]
        return last if isinstance(last, (Finished, Failed)) else None

    def body(self, finished: Finished) -> bytes:
        return orjson.dumps(self._response.finished(finished)[1])
