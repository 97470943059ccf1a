"""Runs cases of the kind `http` against the HTTP layer alone, with small handlers in place of a
model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kslserve import log
from kslserve.http import sse
from kslserve.http.message import Reply, Request
from kslserve.http.router import Router
from kslserve.http.server import HttpLimits, HttpServer
from kslserve.metrics import Metrics
from tests.runners.files import Case
from tests.server.http_cases import run_case

IO_TIMEOUT_S = 0.5
# The text stands once more in the answer, so that a body that was cut or joined wrongly shows.
TEXT = "Grüße, мир, 世界 🌍. "


class Toy:
    """Handlers with the shape of a chat server: it answers by what `mode` says."""

    def __init__(self, metrics: Metrics) -> None:
        self._running = metrics.gauge("requests_running", "Requests with a slot")

    async def health(self, request: Request, reply: Reply) -> None:
        reply.send(200, b'{"status":"ok"}')

    async def chat(self, request: Request, reply: Reply) -> None:
        body = json.loads(request.body)
        gone = asyncio.Event()
        reply.on_close(gone.set)
        self._running.inc()
        try:
            await getattr(self, body["mode"])(body, reply, gone)
        finally:
            self._running.dec()

    async def short(self, body: dict[str, Any], reply: Reply, gone: asyncio.Event) -> None:
        text = body.get("text", "")
        assert text == TEXT * (len(text) // len(TEXT))
        reply.send(200, b'{"object":"chat.completion"}')

    async def long(self, body: dict[str, Any], reply: Reply, gone: asyncio.Event) -> None:
        await gone.wait()

    async def long_stream(self, body: dict[str, Any], reply: Reply, gone: asyncio.Event) -> None:
        reply.start_stream()
        reply.write(sse.frame(b"{}"))
        await gone.wait()

    async def delayed_stream(self, body: dict[str, Any], reply: Reply, gone: asyncio.Event) -> None:
        reply.start_stream()
        loop = asyncio.get_running_loop()
        heartbeat = sse.Heartbeat(loop, 0.05, lambda: reply.write(sse.frame(b'{"choices":[]}')))
        await asyncio.sleep(0.5)
        heartbeat.stop()
        reply.finish(sse.DONE)


def _placeholders() -> dict[str, str]:
    bodies = {
        "CHAT_BODY": {"mode": "short"},
        "BIG_CHAT_BODY": {"mode": "short", "text": TEXT * (65536 // len(TEXT.encode()))},
        "LONG_BODY": {"mode": "long"},
        "LONG_STREAM_BODY": {"mode": "long_stream"},
        "DELAYED_STREAM_BODY": {"mode": "delayed_stream"},
    }
    texts = {name: json.dumps(body, ensure_ascii=False) for name, body in bodies.items()}
    return texts | {"REQUEST_LIMIT_MS": str(int(IO_TIMEOUT_S * 1000))}


async def run_http(case: Case) -> None:
    options = case.get("server", {})
    metrics = Metrics()
    toy = Toy(metrics)
    router = Router(cors_origins=options.get("cors_origin", ()))
    router.add("GET", "/", toy.health)
    router.add("GET", "/healthz", toy.health)
    router.add("GET", "/v1/models", toy.health)
    router.add("POST", "/v1/chat/completions", toy.chat)
    server = HttpServer(router, HttpLimits(io_timeout_s=IO_TIMEOUT_S), metrics, log.get("test"))
    address = await server.start("127.0.0.1", 0)

    def gauge(name: str) -> float:
        return metrics.gauge(name, "").value

    try:
        await asyncio.to_thread(
            run_case, case, (address.host, address.port), _placeholders(), gauge, time_scale=0.01
        )
    finally:
        await server.close()
    assert gauge("connections_open") == 0
    assert gauge("requests_running") == 0
