"""What a dialect is, and the error form of the OpenAI ones.

A dialect is one `Dialect` value, registered for one path in handlers.py; exchange.py drives it. Per
request it makes one `Parsed`: the core.Request and the means to encode its answer. To add a
dialect: write `parse(body, model) -> Parsed`, an Encoder and a Collector, and add its path to the
table in handlers.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import orjson

from kslserve.core.events import Event, Failed, Finished
from kslserve.core.request import Request
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import InvalidRequest, KslError
from kslserve.http.message import Response
from kslserve.service.generation import OnEvents
from kslserve.service.model import ServedModel
from kslserve.service.service import Service

_RETRY_AFTER_S = 1
Headers = tuple[tuple[str, str], ...]


class Running(Protocol):
    """What an exchange needs of what it started: a Generation, or several behind one face.

    usage: the live counts; prompt counts are known at once, the rest when it ends. Times are of
    time.monotonic(), None until they happened. reason: None until it ended well.
    """

    @property
    def seed(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def admitted_at(self) -> float | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def reason(self) -> FinishReason | None: ...
    def cancel(self) -> None: ...


class Encoder(Protocol):
    """The stream of one response. `attach` is called once, before anything else.

    encode: the bytes of a batch of events, in order. The head of the stream belongs to Started,
    which may come twice (the first sign of life of a queued request, then its admission): the
    second one gives nothing. A Finished event gives everything up to the end of the stream, a
    Failed event nothing. A batch may hold neighbours of one kind; merge.py joins them.
    heartbeat: a real event that changes nothing, sent in silence after the head.
    error: the last bytes of a stream whose fault would repeat.
    """

    def attach(self, seed: int, usage: Usage) -> None: ...
    def encode(self, events: Sequence[Event]) -> bytes: ...
    def heartbeat(self) -> bytes: ...
    def error(self, error: KslError) -> bytes: ...


@runtime_checkable
class TextEncoder(Encoder, Protocol):
    """text: `encode` of one TextDelta, without the event."""

    def text(self, text: str) -> bytes: ...


class Collector(Protocol):
    """The whole body of one response. `attach` is called once, before anything else.

    fold: takes a batch, returns its terminal event if there is one. body: the answer.
    """

    def attach(self, seed: int, usage: Usage) -> None: ...
    def fold(self, events: Sequence[Event]) -> Finished | Failed | None: ...
    def body(self, finished: Finished) -> bytes: ...


Start = Callable[[Service, OnEvents], Awaitable[Running]]


@dataclass(frozen=True, slots=True)
class Parsed:
    """One request as read. Whether `encoder` or `collector` is called is up to `request.stream`.

    start: None for one generation of `request`. Otherwise it starts whatever the endpoint needs
    and sends the events of all of it to its OnEvents: one Started, one terminal event at the end.
    """

    request: Request
    encoder: Callable[[], Encoder]
    collector: Callable[[], Collector]
    start: Start | None = None


def closes_stream(error: KslError) -> bool:
    """After the head, a fault that a retry may cure closes the socket without an end mark, which
    every client retries; an error object would end the task in some of them."""
    return error.retryable


def no_headers(request_id: str) -> Headers:
    return ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """name: in log lines. parse: body -> Parsed; raises InvalidRequest. error_response: the
    response to a KslError, given the request id. new_call_id: ids of tool calls. closes_stream:
    whether a fault after the head closes the socket rather than ending the stream with
    `Encoder.error`. headers: further headers of an answer, given the request id."""

    name: str
    parse: Callable[[bytes, ServedModel], Parsed]
    error_response: Callable[[KslError, str], Response]
    new_call_id: Callable[[], str]
    closes_stream: Callable[[KslError], bool] = closes_stream
    headers: Callable[[str], Headers] = no_headers


# ---------------------------------------------------------------- errors of the OpenAI dialects


def error_type(error: KslError) -> str:
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"


def extension(seed: int | None, usage: Usage | None = None) -> dict[str, Any]:
    """The `x_kslserve` object. usage: of an answer that is complete."""
    statistics = usage.statistics if usage is not None else None
    return {"seed": seed, **(statistics.fields() if statistics is not None else {})}


def error_body(error: KslError) -> bytes:
    """The body of an OpenAI dialect. A plain bad field has no code beyond its type."""
    code = None if error.code == InvalidRequest.code else error.code
    return orjson.dumps(
        {
            "error": {
                "message": str(error),
                "type": error_type(error),
                "param": error.param,
                "code": code,
            }
        }
    )


def openai_error(error: KslError, request_id: str) -> Response:
    return Response(error.status, error_headers(error), error_body(error))


def error_headers(error: KslError) -> Headers:
    """`retry-after` in whole seconds where repeating the request makes sense."""
    if error.status not in (429, 503):
        return ()
    seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return (("retry-after", str(max(seconds, 1))),)


def as_ksl_error(error: BaseException) -> KslError:
    """An error for a client: ours as it is, anything else without its details."""
    if isinstance(error, KslError):
        return error
    return KslError("The server failed to answer this request; its log has the details.")
