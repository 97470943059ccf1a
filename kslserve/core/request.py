"""Request: what a client asked, in one shape for every dialect. Plain values; equal requests
compare equal."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kslserve.core.sampling import SamplingParams


class Role(enum.Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a past assistant turn. arguments: the JSON object, keys in received order."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. text: all text parts joined without a separator (images already replaced by their
    placeholder). reasoning: of an assistant turn, None when none came. call_id: of a TOOL turn."""

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool on offer. definition: the object the template prints, `{"type": "function",
    "function": {...}}`, exactly as passed. parameters: its JSON Schema, {} when none came.
    deferred: not printed with the other tools, since the messages bring it in where it is known.
    strict: arguments must be exactly what the schema allows."""

    name: str
    definition: dict[str, Any]
    parameters: dict[str, Any]
    deferred: bool = False
    strict: bool = False


class ToolChoice(enum.Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the visible answer must be: JSON of a schema, by default any object. strict: a keyword
    of the schema that cannot be enforced is an error, else it is left out. path: of the schema in
    the body, for messages."""

    schema: Any = field(default_factory=lambda: {"type": "object"})
    strict: bool = False
    path: str = "response_format"


@dataclass(slots=True)
class Request:
    """model: as sent, echoed back. thinking: None renders the template's default (on). effort: None
    renders like `medium`. template_vars: further template variables the client named. max_tokens:
    None means up to the window. ignore_eos: the model's own end of turn does not stop it. priority:
    lower runs first. reasoning_budget: most tokens of reasoning, None for no such limit. force: the
    answer that the model must give, end tags and calls as it would write them; only for servers
    with test hooks. response_format: None for text. allowed_tools: names of the tools that may be
    called, None for all; the prompt describes all of them either way, so it stays the same.
    statistics: tell what the answer took."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    thinking: bool | None = None
    effort: str | None = None
    preserve_thinking: bool | None = None
    template_vars: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    reasoning_budget: int | None = None
    response_format: ResponseFormat | None = None
    force: str | None = None
    allowed_tools: frozenset[str] | None = None
    statistics: bool = False

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools whose calls count."""
        if self.tool_choice is ToolChoice.NONE:
            return ()
        allowed = self.allowed_tools
        return tuple(t for t in self.tools if allowed is None or t.name in allowed)
