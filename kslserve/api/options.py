"""Fields that the OpenAI dialects have in common: sampling, stop strings, thinking, priority."""

from __future__ import annotations

from typing import Any

from kslserve.api.fields import Fields
from kslserve.core.sampling import SamplingParams
from kslserve.errors import InvalidRequest

STOP_MAX = 16
STOP_CHARS_MAX = 1024
_TOP_K_MAX = 1 << 20
_TOKEN_MAX = 1 << 31
_PRIORITY_MAX = 1 << 31
# Template variables that the server sets itself.
_RESERVED_VARS = frozenset(("messages", "tools", "add_generation_prompt"))


def sampling_of(body: Fields, defaults: SamplingParams, *, logprobs: int | None) -> SamplingParams:
    """defaults: of fields that the client left out. logprobs: as read by the dialect."""

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
        logprobs=logprobs,
        logit_bias=_logit_bias(body),
    )


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


def stop_of(body: Fields) -> tuple[str, ...]:
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


def force_of(body: Fields) -> str | None:
    """The answer that a test wants to get; ignored by servers without test hooks."""
    return body.text("x_kslserve_force")


def statistics_of(body: Fields) -> bool:
    """Whether the end of the answer is to tell what it took, in `x_kslserve`."""
    return body.boolean("x_kslserve_statistics") or False


def priority_of(body: Fields) -> int:
    """Place in the queue: lower runs first."""
    return body.integer("priority", low=-_PRIORITY_MAX, high=_PRIORITY_MAX) or 0


class TemplateOptions:
    """thinking, effort, preserve_thinking and further template variables, from all their spellings.

    A switch beats an effort, a top-level field beats `chat_template_kwargs`, and an effort of
    `none` turns thinking off. budget: most tokens of reasoning."""

    __slots__ = ("budget", "effort", "extra", "preserve", "thinking")

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
        self.budget = _object_or_empty(body, "thinking").integer("budget_tokens", low=0)
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
