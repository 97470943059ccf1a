"""Health and metrics for supervisors and people: /livez /readyz /healthz /metrics, and the root.

/livez says that the event loop turns, /readyz that a model is loaded and waves progress, /healthz
how things are in numbers. They answer in every phase, while the model loads included.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import orjson

from kslserve.api import dialect
from kslserve.http.message import Reply, Request
from kslserve.metrics import Metrics
from kslserve.service.state import Phase, ServerState

_TEXT = "text/plain; charset=utf-8"


class Ops:
    """The handlers. version: of this package."""

    def __init__(self, state: ServerState, metrics: Metrics, version: str) -> None:
        self._state = state
        self._metrics = metrics
        self._version = version
        self._started = time.monotonic()
        self._up = metrics.gauge("engine_up", "1 while requests are served")
        self._busy = metrics.gauge("engine_busy", "1 while a wave is in flight")
        self._phase = metrics.labelled("engine_phase", "1 for the server's phase", "phase", "gauge")
        start = metrics.gauge("process_start_time_seconds", "when it started, since the epoch")
        start.set(round(time.time(), 3))

    async def livez(self, request: Request, reply: Reply) -> None:
        reply.send(200, b"ok\n", _TEXT)

    async def readyz(self, request: Request, reply: Reply) -> None:
        if self._state.ready:
            reply.send(200, b"ok\n", _TEXT)
            return
        error = self._state.unavailable()
        reply.send(503, f"{error}\n".encode(), _TEXT, dialect.error_headers(error))

    async def healthz(self, request: Request, reply: Reply) -> None:
        reply.send(200, orjson.dumps(self._health(), option=orjson.OPT_APPEND_NEWLINE))

    async def metrics(self, request: Request, reply: Reply) -> None:
        state = self._state
        self._up.set(state.ready)
        for phase in Phase:
            self._phase[phase.value].value = phase is state.phase
        if state.service is not None:
            # Brings its gauges up to date.
            self._busy.set(state.service.scheduler.snapshot().in_flight)
        reply.send(200, self._metrics.render().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def root(self, request: Request, reply: Reply) -> None:
        reply.send(200, f"kslserve {self._version}\n".encode(), _TEXT)

    async def hello(self, request: Request, reply: Reply) -> None:
        reply.send(200, b"", _TEXT)

    def _health(self) -> dict[str, Any]:
        state = self._state
        health: dict[str, Any] = {
            "status": "stalled" if state.stalled else state.phase.value,
            "version": self._version,
            "uptime_s": round(time.monotonic() - self._started, 1),
        }
        if state.service is not None:
            model = state.service.model
            health["model"] = model.name
            health["context"] = model.context
            health["numerics"] = model.fingerprint
            health["equality"] = dict(model.equality)
            health["text_bytes"] = state.service.preparer.text_bytes
            health["scheduler"] = dataclasses.asdict(state.service.scheduler.snapshot())
        return health
