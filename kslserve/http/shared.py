"""What the connections of one server share, and how a handler is run.

The set of connections, the set of handler tasks and the counters are changed only by connections,
on the loop thread; the server reads them to stop.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from kslserve.errors import BodyTooLarge, KslError, QueueFull
from kslserve.http.flow import HttpLimits
from kslserve.http.message import Handler, Reply, Request, Response
from kslserve.http.router import Router, plain_error
from kslserve.log import Logger
from kslserve.metrics import Gauge


class Closable(Protocol):
    """A connection, as the server sees it."""

    def close_idle(self) -> bool: ...
    def abort(self) -> None: ...


@dataclass(slots=True)
class Shared:
    """`connections` is ordered by age; `busy` counts open replies to POST requests; once
    `draining`, every response closes its connection."""

    router: Router
    limits: HttpLimits
    log: Logger
    loop: asyncio.AbstractEventLoop
    open_gauge: Gauge
    connections: dict[Closable, None] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    busy: int = 0
    draining: bool = False
    _date_s: int = 0
    _date_line: bytes = b""

    def date_line(self) -> bytes:
        """The Date header line, made once a second."""
        now = int(time.time())
        if now != self._date_s:
            self._date_s = now
            self._date_line = b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
        return self._date_line

    def judge(self, request: Request, too_large: bool) -> Handler | Response:
        """Who answers a request, of which only the head is there, or what does. Raises KslError for
        one that is refused."""
        limits = self.limits
        verdict = self.router.resolve(request)
        if too_large:
            raise BodyTooLarge(f"The body is over {limits.body_bytes} bytes.")
        if request.method == "POST" and 0 < limits.max_requests <= self.busy:
            raise QueueFull(
                "The server is answering as many requests as it takes.", retry_after_s=1
            )
        return verdict

    def spawn(self, handler: Handler, request: Request, reply: Reply) -> None:
        """Run a handler as a task of its own."""
        task = self.loop.create_task(self._run(handler, request, reply))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, handler: Handler, request: Request, reply: Reply) -> None:
        """A handler from start to end. It must have completed its reply when it returns."""
        try:
            await handler(request, reply)
            if not reply.closed:
                raise RuntimeError("the handler returned without completing its reply")
        except KslError as error:
            self._fail(request, reply, error)
        except Exception as error:
            self.log.error(
                "handler failed",
                id=request.request_id,
                error=repr(error),
                trace=traceback.format_exc(),
            )
            self._fail(request, reply, KslError("The server failed; its log has the details."))
        finally:
            if not reply.closed:
                reply.abort()  # the task was cancelled

    def _fail(self, request: Request, reply: Reply, error: KslError) -> None:
        if reply.started:
            reply.abort()
        elif not reply.closed:
            reply.respond(self.error_response(request, error))

    def error_response(self, request: Request | None, error: KslError) -> Response:
        """The response to an error; a plain one if the API layer's mapping fails."""
        try:
            return self.router.error_response(request, error)
        except Exception:
            self.log.error("error mapping failed", trace=traceback.format_exc())
            return plain_error(request, error)

    def refuse(self, reply: Reply, error: KslError, peer: str) -> None:
        """Answer a request that no handler saw, and log it, since nobody else will."""
        request = reply.request
        self.log.info(
            "refused",
            id=reply.request_id,
            peer=peer,
            method=request.method if request else "",
            path=request.path[:200] if request else "",
            status=error.status,
            code=error.code,
            reason=error.message,
        )
        reply.respond(self.error_response(request, error))

    def evict_idle(self) -> bool:
        """Close the oldest idle connection; False when there is none."""
        return any(connection.close_idle() for connection in self.connections)

    def call(self, callbacks: list[Callable[[], None]]) -> None:
        """Callbacks of a reply; one that fails is logged and stops nothing."""
        for callback in callbacks:
            try:
                callback()
            except Exception:
                self.log.error("reply callback failed", trace=traceback.format_exc())
