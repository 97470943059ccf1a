"""Request bodies of the Responses dialect -> core.Request, and the dialect itself.

Parsing is as permissive as that of Chat Completions. Nothing is kept between requests: fields that
refer to kept state are refused, and `store` is answered as if it was false.
"""

from __future__ import annotations

from typing import Any

from kslserve.api.chat_encode import new_call_id
from kslserve.api.dialect import Dialect, Parsed, openai_error
from kslserve.api.fields import Fields, load_object
from kslserve.api.format import format_of
from kslserve.api.options import (
    TemplateOptions,
    force_of,
    priority_of,
    sampling_of,
    statistics_of,
    stop_of,
)
from kslserve.api.responses_encode import ResponsesCollector, ResponsesEncoder
from kslserve.api.responses_items import History, input_items, kind_of
from kslserve.api.responses_request import ResponsesRequest
from kslserve.api.responses_tools import ToolTable, declared_tools, tool_choice_of
from kslserve.core.request import Message, Role
from kslserve.core.sampling import TOP_LOGPROBS_MAX, SamplingParams
from kslserve.errors import KslError, UnsupportedParameter
from kslserve.http.message import Response
from kslserve.metrics import Metrics
from kslserve.service.model import ServedModel

_LOGPROBS = "message.output_text.logprobs"
# Fields that name state which this server does not have.
_STATE = ("previous_response_id", "conversation", "prompt")
_VERBOSITY = ("low", "medium", "high")


def parse(body: bytes | dict[str, Any], defaults: SamplingParams) -> ResponsesRequest:
    """The request of a body. defaults: sampling of fields that the client left out."""
    fields = Fields(body) if isinstance(body, dict) else load_object(body)
    model = fields.required_text("model")
    _refuse_unsupported(fields)
    items = input_items(fields)
    table = _tools(fields, items)
    choice = tool_choice_of(fields, table)
    history = History(table)
    for item in items:
        history.add(item)
    messages = history.messages()
    instructions = fields.text("instructions")
    if instructions:
        messages = (Message(Role.SYSTEM, instructions), *messages)
    template = TemplateOptions(fields)
    parallel = fields.boolean("parallel_tool_calls")
    request = ResponsesRequest(
        model=model,
        messages=messages,
        tools=table.specs,
        tool_choice=choice.kind,
        tool_name=choice.name,
        allowed_tools=choice.allowed,
        parallel_tool_calls=True if parallel is None else parallel,
        sampling=sampling_of(fields, defaults, logprobs=_logprobs(fields)),
        max_tokens=fields.integer("max_output_tokens", low=1),
        stop=stop_of(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        stream=fields.boolean("stream") or False,
        thinking=template.thinking,
        effort=template.effort,
        preserve_thinking=template.preserve,
        template_vars=template.extra,
        priority=priority_of(fields),
        reasoning_budget=template.budget,
        response_format=format_of(_text_format(fields)),
        force=force_of(fields),
        statistics=statistics_of(fields),
        table=table,
        dropped=tuple(history.dropped),
    )
    request.echo = _echo(fields, request)
    return request


def dialect(metrics: Metrics) -> Dialect:
    """The dialect; input items that are left out are counted in `metrics`."""
    dropped = metrics.counter("input_items_dropped_total", "input items of unknown kinds left out")

    def parsed(body: bytes, model: ServedModel) -> Parsed:
        request = parse(body, model.defaults)
        dropped.inc(len(request.dropped))
        return Parsed(
            request,
            encoder=lambda: ResponsesEncoder(request),
            collector=lambda: ResponsesCollector(request),
        )

    return Dialect("responses", parsed, _error_response, new_call_id)


def _error_response(error: KslError, request_id: str) -> Response:
    """Faults of the conversation as a whole are those of `input` here."""
    if error.param == "messages":
        error.param = "input"
    return openai_error(error, request_id)


def _refuse_unsupported(body: Fields) -> None:
    """Known fields that ask for something this server cannot do."""
    for name in _STATE:
        if body.has(name):
            raise UnsupportedParameter(
                f"{name} is not supported: this server keeps no state between requests.", param=name
            )
    if body.boolean("background"):
        raise UnsupportedParameter("background is not supported.", param="background")


def _tools(body: Fields, items: list[Fields]) -> ToolTable:
    """The tools of the body and of its items."""
    declared = declared_tools(body.objects("tools"))
    loaded = []
    for item in items:
        kind = kind_of(item)
        if kind == "additional_tools":
            declared += declared_tools(item.objects("tools"))
        elif kind == "tool_search_output":
            loaded += declared_tools(item.objects("tools"), deferred=True)
    return ToolTable(declared, loaded)


def _text_format(body: Fields) -> Fields | None:
    text = body.object("text")
    return None if text is None else text.object("format")


def _logprobs(body: Fields) -> int | None:
    """Log-probabilities are asked for by `include`, or by a number of them."""
    top = body.integer("top_logprobs", low=0, high=TOP_LOGPROBS_MAX) or 0
    return top if top or _LOGPROBS in (body.items("include") or ()) else None


def _echo(body: Fields, request: ResponsesRequest) -> dict[str, Any]:
    """What the response object repeats of the request."""
    text = body.object("text")
    verbosity = text.raw("verbosity") if text is not None else None
    form = _text_format(body)
    metadata = body.raw("metadata")
    cache_key = body.raw("prompt_cache_key")
    return {
        "background": False,
        "instructions": body.text("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": metadata if isinstance(metadata, dict) else {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": cache_key if isinstance(cache_key, str) else None,
        "reasoning": {"effort": request.effort, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.value,
            **({"verbosity": verbosity} if verbosity in _VERBOSITY else {}),
        },
        "tool_choice": body.raw("tool_choice") or "auto",
        "tools": body.items("tools") or [],
        "top_logprobs": request.sampling.logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
    }
