"""Request bodies of Chat Completions -> core.Request.

Parsing is permissive: unknown fields are ignored, null means absent. A known field of a wrong type
is an InvalidRequest with its path. Fields that change the answer and are not supported raise
UnsupportedParameter; none of them is dropped silently. The answer side is in chat_encode.py.
"""

from __future__ import annotations

from typing import Any

from kslserve.api.chat_messages import messages_of, tool_choice_of, tools_of
from kslserve.api.fields import Fields, load_object
from kslserve.core.request import Request
from kslserve.core.sampling import TOP_LOGPROBS_MAX, SamplingParams
from kslserve.errors import InvalidRequest, UnsupportedParameter

STOP_MAX = 16
STOP_CHARS_MAX = 1024
_TOP_K_MAX = 1 << 20
_TOKEN_MAX = 1 << 31
_PRIORITY_MAX = 1 << 31
# Template variables that the server sets itself.
_RESERVED_VARS = frozenset(("messages", "tools", "add_generation_prompt"))


def parse(body: bytes | dict[str, Any], defaults: SamplingParams) -> Request:
    """The request of a body. defaults: sampling of fields that the client left out."""
    fields = Fields(body) if isinstance(body, dict) else load_object(body)
    model = fields.required_text("model")
    _refuse_unsupported(fields)
    tools = tools_of(fields)
    choice, tool_name = tool_choice_of(fields, tools)
    options = fields.object("stream_options")
    template = _TemplateOptions(fields)
    parallel = fields.boolean("parallel_tool_calls")
    return Request(
        model=model,
        messages=messages_of(fields),
        tools=tools,
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=True if parallel is None else parallel,
        sampling=_sampling(fields, defaults),
        max_tokens=_max_tokens(fields),
        stop=_stop(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        stream=fields.boolean("stream") or False,
        include_usage=options is not None and (options.boolean("include_usage") or False),
        thinking=template.thinking,
        effort=template.effort,
        preserve_thinking=template.preserve,
        template_vars=template.extra,
        priority=fields.integer("priority", low=-_PRIORITY_MAX, high=_PRIORITY_MAX) or 0,
    )


def _refuse_unsupported(body: Fields) -> None:
    """Known fields that ask for something this server cannot do."""
    if (body.integer("n", low=1) or 1) > 1:
        raise UnsupportedParameter("n must be 1: one choice per request.", param="n")
    for name in ("audio", "web_search_options"):
        if body.has(name):
            raise UnsupportedParameter(f"{name} is not supported.", param=name)
    if any(kind != "text" for kind in body.items("modalities") or ()):
        raise UnsupportedParameter("modalities must be text only.", param="modalities")
    response = body.object("response_format")
    if response is not None:
        kind = response.choice("type", ("text", "json_object", "json_schema")) or "text"
        if kind != "text":
            raise UnsupportedParameter(
                f"response_format {kind} is not supported; only text is.", param="response_format"
            )


def _max_tokens(body: Fields) -> int | None:
    """The output limit; the newer of the two names wins when both are given."""
    old = body.integer("max_tokens", low=1)
    new = body.integer("max_completion_tokens", low=1)
    return old if new is None else new


def _sampling(body: Fields, defaults: SamplingParams) -> SamplingParams:
    def number(name: str, default: float) -> float:
        value = body.number(name)
        return default if value is None else value

    top_k = body.integer("top_k", low=-1)
    return SamplingParams(
        temperature=number("temperature", defaults.temperature),
        top_p=number("top_p", defaults.top_p),
        min_p=number("min_p", defaults.min_p),
        # -1 is a common spelling of off, which is 0 here.
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), _TOP_K_MAX),
        presence_penalty=number("presence_penalty", defaults.presence_penalty),
        frequency_penalty=number("frequency_penalty", defaults.frequency_penalty),
        repetition_penalty=number("repetition_penalty", defaults.repetition_penalty),
        seed=body.integer("seed"),
        logprobs=_logprobs(body),
        logit_bias=_logit_bias(body),
    )


def _logprobs(body: Fields) -> int | None:
    wanted = body.boolean("logprobs") or False
    top = body.integer("top_logprobs", low=0, high=TOP_LOGPROBS_MAX) or 0
    if top and not wanted:
        body.refuse("top_logprobs", "needs logprobs to be true")
    return top if wanted else None


def _logit_bias(body: Fields) -> tuple[tuple[int, float], ...]:
    entries = body.object("logit_bias")
    if entries is None:
        return ()
    biases = []
    for key in entries.value:
        bias = entries.number(key)
        if not (key.isascii() and key.isdecimal()) or int(key) >= _TOKEN_MAX:
            body.refuse("logit_bias", "must map token ids to numbers")
        if bias is not None:
            biases.append((int(key), bias))
    return tuple(biases)


def _stop(body: Fields) -> tuple[str, ...]:
    """Stop strings without repeats. Empty ones could never mean anything and are dropped."""
    value = body.raw("stop")
    items = [value] if isinstance(value, str) else body.items("stop") or []
    for index, item in enumerate(items):
        if not isinstance(item, str):
            path = f"stop[{index}]"
            raise InvalidRequest(f"{path} must be a string.", param=path)
        if len(item) > STOP_CHARS_MAX:
            body.refuse("stop", f"takes strings of at most {STOP_CHARS_MAX} characters")
    if len(items) > STOP_MAX:
        body.refuse("stop", f"takes at most {STOP_MAX} strings")
    return tuple(dict.fromkeys(item for item in items if item))


class _TemplateOptions:
    """thinking, effort, preserve_thinking and further template variables, from all their spellings.

    A switch beats an effort, a top-level field beats `chat_template_kwargs`, and an effort of
    `none` turns thinking off."""

    __slots__ = ("effort", "extra", "preserve", "thinking")

    def __init__(self, body: Fields) -> None:
        kwargs = body.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
        reasoning = _object_or_empty(body, "reasoning")
        kind = _object_or_empty(body, "thinking").text("type")
        typed = {"enabled": True, "adaptive": True, "disabled": False}.get(kind or "")
        self.effort = _first(
            body.text("reasoning_effort"), reasoning.text("effort"), kwargs.text("reasoning_effort")
        )
        self.thinking = _first(
            body.boolean("enable_thinking"), kwargs.boolean("enable_thinking"), typed
        )
        if self.thinking is None and self.effort == "none":
            self.thinking = False
        self.preserve = _first(
            body.boolean("preserve_thinking"), kwargs.boolean("preserve_thinking")
        )
        self.extra = _extra_vars(kwargs)


def _object_or_empty(body: Fields, name: str) -> Fields:
    """A field of another dialect: read where it is an object, ignored otherwise."""
    value = body.raw(name)
    return Fields(value if isinstance(value, dict) else {}, name)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _extra_vars(kwargs: Fields) -> dict[str, Any]:
    """Further variables for the template: scalars only, none that the server sets itself."""
    extra = {}
    for name, value in kwargs.value.items():
        if name in ("enable_thinking", "preserve_thinking", "reasoning_effort") or value is None:
            continue
        if name in _RESERVED_VARS:
            kwargs.refuse(name, "cannot be set")
        if not isinstance(value, (str, bool, int, float)):
            kwargs.refuse(name, "must be a string, a number or a boolean")
        extra[name] = value
    return extra
