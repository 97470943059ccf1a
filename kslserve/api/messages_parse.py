"""Request bodies of Messages -> core.Request.

Nothing that can be ignored is refused: the main client answers a 400 by changing and repeating its
request several times. A known field of a wrong type is an InvalidRequest with its path.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kslserve.api.fields import Fields, load_object
from kslserve.api.format import format_of
from kslserve.api.messages_content import Blocks, tools_of
from kslserve.api.options import STOP_CHARS_MAX, force_of, priority_of, sampling_of, statistics_of
from kslserve.core.request import Request, ResponseFormat, ToolChoice, ToolSpec
from kslserve.core.sampling import SamplingParams
from kslserve.errors import InvalidRequest


class DefaultThinking(enum.Enum):
    """What a request without `thinking` gets: none, thinking that is not sent, thinking blocks."""

    OFF = "off"
    HIDDEN = "hidden"
    ON = "on"


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """request: what to generate. show_thinking: reasoning goes to the client."""

    request: Request
    show_thinking: bool


def parse(
    body: bytes,
    defaults: SamplingParams,
    default_thinking: DefaultThinking,
    dropped: Callable[[], None],
    *,
    count_only: bool = False,
) -> MessagesRequest:
    """The request of a body. defaults: sampling of fields that the client left out. dropped: called
    for each content block of an unknown type. count_only: only the prompt matters, so fields about
    the answer are not looked at."""
    fields = load_object(body)
    model = fields.required_text("model")
    tools = tools_of(fields)
    blocks = Blocks(tools, dropped)
    messages = (*blocks.system(fields), *blocks.messages(fields))
    choice, tool_name, parallel = _tool_choice(fields, tools)
    effort = _effort(fields)
    thinking, shown, budget = _thinking(fields, effort, default_thinking)
    request = Request(
        model=model,
        messages=messages,
        tools=tuple(blocks.tools),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        thinking=thinking,
        effort=effort,
        preserve_thinking=fields.boolean("preserve_thinking"),
        reasoning_budget=budget,
    )
    if not count_only:
        request.sampling = sampling_of(fields, defaults, logprobs=None)
        request.max_tokens = fields.integer("max_tokens", low=1)
        request.stop = _stop(fields)
        request.response_format = _format(fields)
        request.stream = fields.boolean("stream") or False
        request.priority = priority_of(fields)
        request.force = force_of(fields)
        request.statistics = statistics_of(fields)
    return MessagesRequest(request, shown)


def _stop(body: Fields) -> tuple[str, ...]:
    """Stop strings without repeats. Empty ones could never mean anything and are dropped."""
    items = body.items("stop_sequences") or []
    for index, item in enumerate(items):
        if not isinstance(item, str):
            path = f"stop_sequences[{index}]"
            raise InvalidRequest(f"{path} must be a string.", param=path)
        if len(item) > STOP_CHARS_MAX:
            body.refuse("stop_sequences", f"takes strings of at most {STOP_CHARS_MAX} characters")
    return tuple(dict.fromkeys(item for item in items if item))


def _effort(body: Fields) -> str | None:
    output = body.object("output_config")
    return None if output is None else output.text("effort")


def _format(body: Fields) -> ResponseFormat | None:
    output = body.object("output_config")
    return None if output is None else format_of(output.object("format"))


def _thinking(
    body: Fields, effort: str | None, default: DefaultThinking
) -> tuple[bool, bool, int | None]:
    """(whether the model thinks, whether the client sees it, most tokens of it).

    The switch beats an effort of `none`, which beats the server's default. A budget changes
    neither.
    """
    switch = body.object("thinking")
    if switch is None:
        off = default is DefaultThinking.OFF or (effort or "").strip().lower() == "none"
        return not off, default is DefaultThinking.ON, None
    budget = switch.integer("budget_tokens", low=0)
    if switch.text("type") == "disabled":
        return False, True, None
    return True, True, budget


def _tool_choice(body: Fields, tools: list[ToolSpec]) -> tuple[ToolChoice, str | None, bool]:
    """(choice, name of the forced tool, whether calls may be parallel). A choice that only a
    vendor's own tool could meet leaves the model free: that tool is not offered."""
    entry = body.object("tool_choice")
    if entry is None:
        return ToolChoice.AUTO, None, True
    parallel = not entry.boolean("disable_parallel_tool_use")
    kind = entry.choice("type", ("auto", "any", "tool", "none")) or "auto"
    if kind == "none":
        return ToolChoice.NONE, None, parallel
    if kind == "any":
        if not body.items("tools"):
            body.refuse("tool_choice", "needs tools")
        return (ToolChoice.REQUIRED if tools else ToolChoice.AUTO), None, parallel
    if kind == "tool":
        name = entry.required_text("name")
        if any(tool.name == name for tool in tools):
            return ToolChoice.NAMED, name, parallel
        if all(tool.text("name") != name for tool in body.objects("tools")):
            entry.refuse("name", "must name one of the tools")
    return ToolChoice.AUTO, None, parallel
