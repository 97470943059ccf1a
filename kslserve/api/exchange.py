"""The one handler of the generating endpoints: parse, start, encode, cancel.

A response is a stream of bytes made on the event loop by callbacks of the scheduler; the handler's
task only waits for its end. It writes one log line, whatever happened.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable

from kslserve import log
from kslserve.api.dialect import (
    Collector,
    Dialect,
    Encoder,
    Headers,
    Running,
    TextEncoder,
    as_ksl_error,
)
from kslserve.api.merge import merge
from kslserve.core.events import Event, Failed, Finished, Started, TextDelta
from kslserve.core.usage import Usage
from kslserve.errors import KslError
from kslserve.http.message import Reply, Request
from kslserve.http.sse import Heartbeat
from kslserve.metrics import Metrics
from kslserve.service.service import Service
from kslserve.service.state import ServerState

_log = log.get("request")
_TERMINAL = (Finished, Failed)
_PENDING_MAX = 256  # events of a paused reader, before they are joined


class Counts:
    """What all exchanges count: answers by HTTP status, and requests by what became of them. Of
    those submitted, the ones that were neither completed, cancelled, failed nor rejected run."""

    __slots__ = ("requests", "responses")

    def __init__(self, metrics: Metrics) -> None:
        self.responses = metrics.labelled("responses_total", "answers by HTTP status", "status")
        self.requests = metrics.labelled("requests_total", "requests by their state", "state")
        for state in ("submitted", "completed", "cancelled", "failed", "rejected"):
            self.requests[state].value = 0


class Exchange:
    """One request and its answer, streamed or whole, in the words of a dialect."""

    def __init__(
        self,
        dialect: Dialect,
        request: Request,
        reply: Reply,
        heartbeat_s: float,
        counts: Counts,
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._reply = reply
        self._heartbeat_s = heartbeat_s
        self._counts = counts
        self._state = "completed"
        self._begun = time.monotonic()
        self._status = 200
        self._end = ""
        self._generation: Running | None = None
        self._terminal: asyncio.Future[Finished | Failed]
        self._encoder: Encoder | None = None
        self._encode_text: Callable[[str], bytes]  # of an encoder that has it
        self._collector: Collector | None = None
        self._heartbeat: Heartbeat | None = None
        self._pending: list[Event] = []  # of a paused reader

    async def run(self, state: ServerState) -> None:
        """Answer the request. Never raises a KslError."""
        reply = self._reply
        self._counts.requests["submitted"].inc()
        self._terminal = asyncio.get_running_loop().create_future()
        reply.on_close(self._client_left)
        try:
            service = state.require()
            terminal = await self._generate(service)
            if isinstance(terminal, Failed):
                self._fail(terminal.error)
            elif self._collector is not None and not reply.closed:
                reply.send(200, self._collector.body(terminal), headers=self._headers())
        except KslError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._client_left()
            raise
        except Exception as error:
            _log.error("handler failed", id=self._request.request_id, trace=traceback.format_exc())
            self._fail(as_ksl_error(error))
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._report()
            self._generation = None  # which knows this exchange

    async def _generate(self, service: Service) -> Finished | Failed:
        parsed = self._dialect.parse(self._request.body, service.model)
        answer: Encoder | Collector
        if parsed.request.stream:
            answer = self._encoder = parsed.encoder()
            self._reply.on_drain(self._drained)
            self._heartbeat = Heartbeat(
                asyncio.get_running_loop(), self._heartbeat_s, self._keep_alive
            )
        else:
            answer = self._collector = parsed.collector()
        on_events = self._deliver
        generation: Running
        if parsed.start is None:
            new_call_id = self._dialect.new_call_id
            generation = await service.start(parsed.request, on_events, new_call_id)
            if isinstance(answer, TextEncoder):
                self._encode_text = answer.text
                generation.on_text = self._deliver_text
        else:
            generation = await parsed.start(service, on_events)
        self._generation = generation
        answer.attach(generation.seed, generation.usage)
        if self._reply.closed:
            generation.cancel()
        return await self._terminal

    # ------------------------------------------------------------ events

    def _deliver(self, events: list[Event]) -> None:
        """A fault of ours ends this exchange, and no other."""
        try:
            if self._encoder is not None:
                self._stream(self._encoder, events)
            else:
                self._collect(events)
        except Exception as error:
            self._broken(error)

    def _deliver_text(self, text: str) -> None:
        """`_deliver` of one TextDelta."""
        reply = self._reply
        if reply.paused or not reply.started:
            self._deliver([TextDelta(text)])
            return
        try:
            reply.write(self._encode_text(text))
        except Exception as error:
            self._broken(error)
        else:
            assert self._heartbeat is not None
            self._heartbeat.touched = True

    def _broken(self, error: Exception) -> None:
        _log.error("encoding failed", id=self._request.request_id, trace=traceback.format_exc())
        usage = self._generation.usage if self._generation is not None else Usage()
        self._resolve(Failed(as_ksl_error(error), usage))
        if self._generation is not None:
            self._generation.cancel()

    def _collect(self, events: list[Event]) -> None:
        assert self._collector is not None
        terminal = self._collector.fold(events)
        if terminal is not None:
            self._resolve(terminal)

    def _stream(self, encoder: Encoder, events: list[Event]) -> None:
        """Write a wave's events; while the reader is slow they pile up, merged, and go out in one
        piece when it has caught up. The engine is never held back."""
        reply = self._reply
        if reply.paused and not reply.closed:
            self._pending += events
            if len(self._pending) > _PENDING_MAX:
                self._pending = merge(self._pending)
        elif reply.started and type(events[-1]) not in _TERMINAL:
            assert self._heartbeat is not None
            reply.write(encoder.encode(events))
            self._heartbeat.touched = True
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
            self._reply.start_stream(headers=self._headers())
        self._reply.write(data)
        if self._heartbeat is not None:
            self._heartbeat.touched = True

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
        self._state = "cancelled"
        if self._pending:
            self._drained()
        if self._generation is not None:
            self._generation.cancel()

    def _fail(self, error: KslError) -> None:
        """Tell the client: by a response, or after the head as the dialect says."""
        response = self._dialect.error_response(error, self._request.request_id)
        self._status = response.status
        self._end = self._end or error.code
        if self._state != "cancelled":
            self._state = "rejected" if self._generation is None else "failed"
        reply = self._reply
        if reply.closed:
            return
        if not reply.started:
            reply.respond(response)
        elif self._encoder is None or self._dialect.closes_stream(error):
            reply.abort()
        else:
            reply.write(self._encoder.error(error))
            reply.finish()

    def _headers(self) -> Headers:
        return self._dialect.headers(self._request.request_id)

    def _report(self) -> None:
        self._counts.responses[str(self._status)].inc()
        self._counts.requests[self._state].inc()
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
            dialect=self._dialect.name,
            status=self._status,
            stream=int(self._encoder is not None),
            **fields,
            total_ms=self._since(time.monotonic()),
            end=self._end,
        )

    def _since(self, moment: float | None) -> float | str:
        """Milliseconds from the request's arrival."""
        return "-" if moment is None else round((moment - self._begun) * 1e3, 1)
