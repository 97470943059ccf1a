"""The one handler of the generating endpoints: parse, start, encode, cancel; and the table of
routes.

A response is a stream of bytes made on the event loop by callbacks of the scheduler; the handler's
task only waits for its end. It writes one log line, whatever happened.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from functools import partial

from kslserve import log
from kslserve.api import chat, dialect, models
from kslserve.api.chat_encode import ChatCollector, ChatEncoder, new_call_id
from kslserve.api.merge import merge
from kslserve.api.ops import Ops
from kslserve.core.events import Event, Failed, Finished, Started
from kslserve.core.usage import Usage
from kslserve.errors import KslError, NotFound
from kslserve.http.message import Reply, Request, Response
from kslserve.http.router import Router
from kslserve.http.sse import Heartbeat
from kslserve.metrics import Labelled, Metrics
from kslserve.service.generation import Generation
from kslserve.service.service import Service
from kslserve.service.state import ServerState

_log = log.get("request")
_TERMINAL = (Finished, Failed)
_PENDING_MAX = 256  # events of a paused reader, before they are joined


def register(
    router: Router, state: ServerState, metrics: Metrics, *, heartbeat_s: float, version: str
) -> None:
    """Add every route, and the error bodies of requests that reach none."""
    ops = Ops(state, metrics, version)
    statuses = metrics.labelled("requests_total", "finished requests by HTTP status", "status")

    async def chat_completions(request: Request, reply: Reply) -> None:
        await Exchange(request, reply, heartbeat_s, statuses).run(state)

    async def list_models(request: Request, reply: Reply) -> None:
        reply.send(200, models.list_body(state.require().model))

    async def one_model(request: Request, reply: Reply) -> None:
        reply.send(200, models.one_body(state.require().model, request.params["id"]))

    router.add("POST", "/v1/chat/completions", chat_completions)
    router.add("GET", "/v1/models", list_models)
    router.add("GET", "/v1/models/{id}", one_model)
    router.add("GET", "/livez", ops.livez)
    router.add("GET", "/readyz", ops.readyz)
    router.add("GET", "/healthz", ops.healthz)
    router.add("GET", "/metrics", ops.metrics)
    router.add("GET", "/", ops.root)
    router.add("GET", "/api/hello", ops.hello)
    router.on_error = partial(_error_response, state)


def _error_response(state: ServerState, request: Request | None, error: KslError) -> Response:
    """The response of an error outside any exchange. Before the model is loaded no path is known to
    be wrong."""
    if isinstance(error, NotFound) and state.service is None:
        error = state.unavailable()
    return Response(error.status, dialect.error_headers(error), dialect.error_body(error))


class Exchange:
    """One Chat Completions request and its answer, streamed or whole."""

    def __init__(
        self, request: Request, reply: Reply, heartbeat_s: float, statuses: Labelled
    ) -> None:
        self._request = request
        self._reply = reply
        self._heartbeat_s = heartbeat_s
        self._statuses = statuses
        self._begun = time.monotonic()
        self._status = 200
        self._end = ""
        self._generation: Generation | None = None
        self._terminal: asyncio.Future[Finished | Failed]
        self._encoder: ChatEncoder | None = None
        self._collector: ChatCollector | None = None
        self._heartbeat: Heartbeat | None = None
        self._pending: list[Event] = []  # of a paused reader

    async def run(self, state: ServerState) -> None:
        """Answer the request. Never raises a KslError."""
        reply = self._reply
        self._terminal = asyncio.get_running_loop().create_future()
        reply.on_close(self._client_left)
        try:
            service = state.require()
            terminal = await self._generate(service)
            if isinstance(terminal, Failed):
                self._fail(terminal.error)
            elif self._collector is not None and not reply.closed:
                reply.send(200, self._collector.body(terminal))
        except KslError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._client_left()
            raise
        except Exception as error:
            _log.error("handler failed", id=self._request.request_id, trace=traceback.format_exc())
            self._fail(dialect.as_ksl_error(error))
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._report()

    async def _generate(self, service: Service) -> Finished | Failed:
        request = chat.parse(self._request.body, service.model.defaults)
        answer: ChatEncoder | ChatCollector
        model = service.model
        if request.stream:
            answer = self._encoder = ChatEncoder(
                request.model, model.fingerprint, include_usage=request.include_usage
            )
            deliver = self._stream
            self._reply.on_drain(self._drained)
            self._heartbeat = Heartbeat(
                asyncio.get_running_loop(), self._heartbeat_s, self._keep_alive
            )
        else:
            answer = self._collector = ChatCollector(
                request.model, model.fingerprint, logprobs=request.sampling.logprobs is not None
            )
            deliver = self._collect
        generation = await service.start(request, partial(self._deliver, deliver), new_call_id)
        self._generation = generation
        answer.set_seed(generation.seed)
        if self._reply.closed:
            generation.cancel()
        return await self._terminal

    # ------------------------------------------------------------ events

    def _deliver(self, deliver: Callable[[list[Event]], None], events: list[Event]) -> None:
        """A fault of ours ends this exchange, and no other."""
        try:
            deliver(events)
        except Exception as error:
            _log.error("encoding failed", id=self._request.request_id, trace=traceback.format_exc())
            usage = self._generation.usage if self._generation is not None else Usage()
            self._resolve(Failed(dialect.as_ksl_error(error), usage))
            if self._generation is not None:
                self._generation.cancel()

    def _collect(self, events: list[Event]) -> None:
        assert self._collector is not None
        terminal = self._collector.fold(events)
        if terminal is not None:
            self._resolve(terminal)

    def _stream(self, events: list[Event]) -> None:
        """Write a wave's events; while the reader is slow they pile up, merged, and go out in one
        piece when it has caught up. The engine is never held back."""
        reply = self._reply
        if reply.paused and not reply.closed:
            self._pending += events
            if len(self._pending) > _PENDING_MAX:
                self._pending = merge(self._pending)
        elif reply.started and type(events[-1]) not in _TERMINAL:
            assert self._encoder is not None
            assert self._heartbeat is not None
            reply.write(self._encoder.encode(events))
            self._heartbeat.touch()
        else:
            self._write(events)

    def _drained(self) -> None:
        events, self._pending = self._pending, []
        if events:
            self._write(events)

    def _write(self, events: list[Event]) -> None:
        reply = self._reply
        last = events[-1]
        terminal = last if isinstance(last, _TERMINAL) else None
        if not reply.closed:
            assert self._encoder is not None
            data = self._encoder.encode(events)
            if isinstance(terminal, Finished) and reply.started:
                reply.finish(data)
            elif data:
                self._send(data)
                if isinstance(terminal, Finished):
                    reply.finish()
        if terminal is not None:
            self._resolve(terminal)

    def _send(self, data: bytes) -> None:
        if not self._reply.started:
            self._reply.start_stream()
        self._reply.write(data)
        if self._heartbeat is not None:
            self._heartbeat.touch()

    def _keep_alive(self) -> None:
        """Nothing was sent for a while. A request that still waits for its admission gets its head
        and first event now: clients give up on a silent server sooner than the queue does."""
        if self._reply.closed or self._reply.paused or self._terminal.done():
            return
        assert self._encoder is not None
        if self._reply.started:
            self._send(self._encoder.heartbeat())
        elif self._generation is not None:
            self._send(self._encoder.encode([Started()]))

    def _resolve(self, terminal: Finished | Failed) -> None:
        if not self._terminal.done():
            self._terminal.set_result(terminal)

    # ------------------------------------------------------------ ends

    def _client_left(self) -> None:
        self._end = "client_left"
        if self._pending:
            self._drained()
        if self._generation is not None:
            self._generation.cancel()

    def _fail(self, error: KslError) -> None:
        """Tell the client. After the head, a fault that a retry may cure closes the socket, which
        every client retries; one that would repeat is sent as an error object, which ends the
        task."""
        self._status = error.status
        self._end = self._end or error.code
        reply = self._reply
        if reply.closed:
            return
        if not reply.started:
            reply.send(
                error.status, dialect.error_body(error), headers=dialect.error_headers(error)
            )
        elif error.retryable or self._encoder is None:
            reply.abort()
        else:
            reply.write(self._encoder.error(error))
            reply.finish()

    def _report(self) -> None:
        self._statuses[str(self._status)].inc()
        fields: dict[str, object] = {}
        generation = self._generation
        if generation is not None:
            usage = generation.usage
            fields = {
                "prompt": usage.prompt_tokens,
                "cached": usage.cached_tokens,
                "output": usage.completion_tokens,
                "queue_ms": self._since(generation.admitted_at),
                "first_ms": self._since(generation.first_token_at),
            }
            if not self._end and generation.reason is not None:
                self._end = generation.reason.value
        _log.info(
            "request",
            id=self._request.request_id,
            dialect="chat",
            status=self._status,
            stream=int(self._encoder is not None),
            **fields,
            total_ms=self._since(time.monotonic()),
            end=self._end,
        )

    def _since(self, moment: float | None) -> float | str:
        """Milliseconds from the request's arrival."""
        return "-" if moment is None else round((moment - self._begun) * 1e3, 1)
