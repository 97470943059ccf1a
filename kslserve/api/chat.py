"""Request bodies of Chat Completions -> core.Request.

Parsing is permissive: unknown fields are ignored, null means absent. A known field of a wrong type
is an InvalidRequest with its path. Fields that change the answer and are not supported raise
UnsupportedParameter; none of them is dropped silently. The answer side is in chat_encode.py.
"""

from __future__ import annotations

from typing import Any

from kslserve.api.chat_encode import ChatCollector, ChatEncoder, new_call_id
from kslserve.api.chat_messages import messages_of, tool_choice_of, tools_of
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
from kslserve.core.request import Request
from kslserve.core.sampling import TOP_LOGPROBS_MAX, SamplingParams
from kslserve.errors import UnsupportedParameter
from kslserve.service.model import ServedModel


def parse(body: bytes | dict[str, Any], defaults: SamplingParams) -> Request:
    """The request of a body. defaults: sampling of fields that the client left out."""
    fields = Fields(body) if isinstance(body, dict) else load_object(body)
    model = fields.required_text("model")
    _refuse_unsupported(fields)
    tools = tools_of(fields)
    choice = tool_choice_of(fields, tools)
    options = fields.object("stream_options")
    template = TemplateOptions(fields)
    parallel = fields.boolean("parallel_tool_calls")
    return Request(
        model=model,
        messages=messages_of(fields),
        tools=tools,
        tool_choice=choice.kind,
        tool_name=choice.name,
        allowed_tools=choice.allowed,
        parallel_tool_calls=True if parallel is None else parallel,
        sampling=sampling_of(fields, defaults, logprobs=_logprobs(fields)),
        max_tokens=_max_tokens(fields),
        stop=stop_of(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        stream=fields.boolean("stream") or False,
        include_usage=options is not None and (options.boolean("include_usage") or False),
        thinking=template.thinking,
        effort=template.effort,
        preserve_thinking=template.preserve,
        template_vars=template.extra,
        priority=priority_of(fields),
        reasoning_budget=template.budget,
        response_format=format_of(fields.object("response_format")),
        force=force_of(fields),
        statistics=statistics_of(fields),
    )


def _parsed(body: bytes, model: ServedModel) -> Parsed:
    request = parse(body, model.defaults)
    return Parsed(
        request,
        encoder=lambda: ChatEncoder(
            request.model, model.fingerprint, include_usage=request.include_usage
        ),
        collector=lambda: ChatCollector(
            request.model, model.fingerprint, logprobs=request.sampling.logprobs is not None
        ),
    )


DIALECT = Dialect("chat", _parsed, openai_error, new_call_id)


def _refuse_unsupported(body: Fields) -> None:
    """Known fields that ask for something this server cannot do."""
    if (body.integer("n", low=1) or 1) > 1:
        raise UnsupportedParameter("n must be 1: one choice per request.", param="n")
    for name in ("audio", "web_search_options"):
        if body.has(name):
            raise UnsupportedParameter(f"{name} is not supported.", param=name)
    if any(kind != "text" for kind in body.items("modalities") or ()):
        raise UnsupportedParameter("modalities must be text only.", param="modalities")


def _max_tokens(body: Fields) -> int | None:
    """The output limit; the newer of the two names wins when both are given."""
    old = body.integer("max_tokens", low=1)
    new = body.integer("max_completion_tokens", low=1)
    return old if new is None else new


def _logprobs(body: Fields) -> int | None:
    wanted = body.boolean("logprobs") or False
    top = body.integer("top_logprobs", low=0, high=TOP_LOGPROBS_MAX) or 0
    if top and not wanted:
        body.refuse("top_logprobs", "needs logprobs to be true")
    return top if wanted else None
