"""The table of routes: which path speaks which dialect, and who answers the rest."""

from __future__ import annotations

from functools import partial

from kslserve.api import chat, completions, models, responses
from kslserve.api.dialect import Dialect, openai_error
from kslserve.api.exchange import Counts, Exchange
from kslserve.api.messages import Messages
from kslserve.api.messages_parse import DefaultThinking
from kslserve.api.ops import Ops
from kslserve.errors import KslError, NotFound
from kslserve.http.message import Handler, Reply, Request, Response
from kslserve.http.router import Router
from kslserve.metrics import Metrics
from kslserve.service.state import ServerState


def register(
    router: Router,
    state: ServerState,
    metrics: Metrics,
    *,
    heartbeat_s: float,
    version: str,
    messages_thinking: DefaultThinking,
) -> None:
    """Add every route, and the error bodies of requests that reach none. messages_thinking: what a
    Messages request without `thinking` gets."""
    messages = Messages(messages_thinking, metrics)
    dialects = {
        "/v1/chat/completions": chat.DIALECT,
        "/v1/responses": responses.dialect(metrics),
        "/v1/completions": completions.DIALECT,
        "/v1/messages": messages.dialect,
    }
    ops = Ops(state, metrics, version)
    counts = Counts(metrics)

    def generating(dialect: Dialect) -> Handler:
        async def handler(request: Request, reply: Reply) -> None:
            await Exchange(dialect, request, reply, heartbeat_s, counts).run(state)

        return handler

    async def list_models(request: Request, reply: Reply) -> None:
        reply.send(200, models.list_body(state.require().model))

    async def one_model(request: Request, reply: Reply) -> None:
        reply.send(200, models.one_body(state.require().model, request.params["id"]))

    for path, dialect in dialects.items():
        router.add("POST", path, generating(dialect))
    router.add("POST", "/v1/messages/count_tokens", messages.count_tokens(state))
    router.add("GET", "/v1/models", list_models)
    router.add("GET", "/v1/models/{id}", one_model)
    router.add("GET", "/livez", ops.livez)
    router.add("GET", "/readyz", ops.readyz)
    router.add("GET", "/healthz", ops.healthz)
    router.add("GET", "/metrics", ops.metrics)
    router.add("GET", "/", ops.root)
    router.add("GET", "/api/hello", ops.hello)
    router.on_error = partial(_error_response, state, dialects)


def _error_response(
    state: ServerState, dialects: dict[str, Dialect], request: Request | None, error: KslError
) -> Response:
    """The response of an error outside any exchange, in the form of the dialect of its path or of
    the path above it. Before the model is loaded no path is known to be wrong."""
    if isinstance(error, NotFound) and state.service is None:
        error = state.unavailable()
    if request is None:
        return openai_error(error, "")
    for path, dialect in dialects.items():
        if request.path == path or request.path.startswith(path + "/"):
            return dialect.error_response(error, request.request_id)
    return openai_error(error, request.request_id)
