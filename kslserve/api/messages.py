"""The Messages dialect: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import orjson

from kslserve.api.dialect import Dialect, Parsed
from kslserve.api.messages_encode import (
    MessagesCollector,
    MessagesEncoder,
    error_response,
    id_headers,
    new_call_id,
)
from kslserve.api.messages_parse import DefaultThinking, parse
from kslserve.http.message import Handler, Reply, Request
from kslserve.metrics import Metrics
from kslserve.service.model import ServedModel
from kslserve.service.state import ServerState


class Messages:
    """default_thinking: what a request without `thinking` gets."""

    def __init__(self, default_thinking: DefaultThinking, metrics: Metrics) -> None:
        self._default = default_thinking
        self._dropped = metrics.counter(
            "content_blocks_dropped_total", "content blocks of unknown types, left out of prompts"
        )
        self.dialect = Dialect(
            "messages", self._parsed, error_response, new_call_id, headers=id_headers
        )

    def _parsed(self, body: bytes, model: ServedModel) -> Parsed:
        read = parse(body, model.defaults, self._default, self._dropped.inc)
        name, shown = read.request.model, read.show_thinking
        return Parsed(
            read.request,
            encoder=lambda: MessagesEncoder(name, show_thinking=shown),
            collector=lambda: MessagesCollector(name, show_thinking=shown),
        )

    def count_tokens(self, state: ServerState) -> Handler:
        """The handler that counts a prompt's tokens: exact, and without engine or queue."""

        async def handler(request: Request, reply: Reply) -> None:
            service = state.require()
            read = parse(
                request.body, service.model.defaults, self._default, _ignore, count_only=True
            )
            count = await service.preparer.count(read.request)
            body = orjson.dumps({"input_tokens": count})
            reply.send(200, body, headers=id_headers(request.request_id))

        return handler


def _ignore() -> None:
    """Blocks are counted when they come with a message."""
