"""ChatTemplate: messages and tools -> the prompt, by the model's own template.

`render` is the official rendering and nothing else. `prompt` is what the server uses: it puts the
messages in order first, maps effort, keeps reasoning in history where asked to, and marks typed
text so that it cannot become control tokens. The settings of the template engine are those the
templates were written for: a rendering that differs in one character is a different prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kslserve.core.request import Message, ToolSpec
from kslserve.errors import InvalidRequest, KslError, ModelFileError
from kslserve.text.assistant_turn import render_turn, split_inline_reasoning
from kslserve.text.conversation import (
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    TemplateMessage,
    is_wrapped_response,
    last_query_index,
    normalise,
)
from kslserve.text.effort import template_effort, template_thinking
from kslserve.text.marks import CONTROL_TOKENS, Marker, resolve, turn_mark
from kslserve.text.rendered import Rendered
from kslserve.text.turns import assistant_turns, boundaries

_TURN_END = "<|im_end|>\n"
_THINK_OPEN = "<think>"

_BUNDLED = {"3.5": "qwen3_5.jinja", "3.6": "qwen3_6.jinja", "3.8": "qwen3_8.jinja"}

# Decided by `prompt` itself; a client's template variables cannot reach them.
_OWN_VARIABLES = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "enable_thinking",
        "preserve_thinking",
        "reasoning_effort",
    )
)

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


def bundled(version: str) -> str:
    """Source of the official template of generation `3.5`, `3.6` or `3.8`. Raises KeyError."""
    path = Path(__file__).resolve().parent.parent / "templates" / _BUNDLED[version]
    return path.read_bytes().decode()


def detect_version(source: str) -> str:
    """Generation of a template, by its text: names are changed by everyone who publishes a copy."""
    if "resolved_reasoning_effort" in source:
        return "3.8"
    return "3.6" if "preserve_thinking" in source else "3.5"


class ChatTemplate:
    """One compiled template. Immutable, usable from several threads.

    source: text of a `chat_template.jinja`. control_tokens: added tokens of the tokenizer in use.
    Raises ModelFileError if the source is not a template.
    """

    def __init__(self, source: str, control_tokens: Iterable[str] = CONTROL_TOKENS):
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"The chat template is damaged: {error}.") from error
        self.version = detect_version(source)
        self._marker = Marker(control_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The official rendering. Raises jinja2.TemplateError (and what Python raises for data that
        the template cannot handle, such as TypeError)."""
        # Macros and their scopes refer to each other, and keep these until cycles are collected.
        seen = {"messages": [*messages]}
        if tools is not None:
            seen["tools"] = [*tools]
        try:
            return self._template.render(seen, **variables)
        finally:
            for items in seen.values():
                items.clear()

    def prompt(
        self,
        request_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        thinking: bool | None = None,
        effort: str | None = None,
        preserve: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt of a request, up to where the model is to go on.

        thinking: None for the template's default. effort: any client spelling. preserve: keep the
        reasoning of past turns, in every generation. extra: further template variables.
        If the last message is an assistant's without tool calls, the model goes on with its text:
        the turn is left open, its reasoning closed; white space at its end is lost. An empty one is
        ignored. Raises InvalidRequest if there is no user message or the template refuses the
        messages.
        """
        try:
            return self._prompt(
                request_messages, tools or (), thinking, effort, preserve, extra or {}
            )
        except KslError:
            raise
        except _RENDER_ERRORS as error:
            raise InvalidRequest(
                f"The chat template cannot render the messages: {error}", param="messages"
            ) from error

    def _prompt(
        self,
        request_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        thinking: bool | None,
        effort: str | None,
        preserve: bool,
        extra: Mapping[str, Any],
    ) -> Rendered:
        messages = normalise(request_messages)
        if _is_empty_assistant(messages[-1]):
            messages.pop()
        continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        messages = [self._marked(message) for message in messages]
        turns: list[str] = []
        if preserve and self.version == "3.5":
            messages = _with_past_reasoning(messages, turns)
        variables = {
            name: self._marker.value(value)
            for name, value in extra.items()
            if name not in _OWN_VARIABLES
        }
        variables.update(self._switches(thinking, effort, preserve))
        if tools:
            variables["tools"] = [self._marker.value(tool.definition) for tool in tools]
        marked = self.render(messages, add_generation_prompt=not continues, **variables)
        if continues:
            marked = marked.removesuffix(_TURN_END)
        text, breaks = resolve(marked, turns)
        thinking_open = text.rstrip("\n").endswith(_THINK_OPEN) and not continues
        past = sum(message["role"] == "assistant" for message in messages) - continues
        turns_at, new_turn = assistant_turns(text, breaks, past)
        return Rendered(
            text,
            thinking_open,
            boundaries(text, breaks),
            breaks,
            turns_at,
            None if continues else new_turn,
        )

    def _switches(
        self, thinking: bool | None, effort: str | None, preserve: bool
    ) -> dict[str, Any]:
        """Variables of the template's own switches. One that is not set is left out: null is not
        absent."""
        switches: dict[str, Any] = {}
        resolved = template_thinking(thinking, effort)
        if resolved is not None:
            switches["enable_thinking"] = resolved
        if self.version != "3.5":
            switches["preserve_thinking"] = preserve
        if self.version == "3.8" and resolved is not False:
            switches["reasoning_effort"] = template_effort(effort)
        return switches

    def _marked(self, message: TemplateMessage) -> TemplateMessage:
        """A message whose texts carry marks, otherwise equal for the template."""
        mark = self._marker.text
        content, reasoning = message["content"], message.get("reasoning_content")
        marked = dict(message)
        if message["role"] == "assistant":
            # These templates look for think tags in the content, where they would no longer find
            # them.
            if (
                reasoning is None
                and self.version != "3.8"
                and (parts := split_inline_reasoning(content))
            ):
                reasoning, content = parts
            if reasoning is not None:
                marked["reasoning_content"] = mark(reasoning)
            if "tool_calls" in message:
                marked["tool_calls"] = [self._marked_call(call) for call in message["tool_calls"]]
        if message["role"] == "user" and is_wrapped_response(content):
            # The templates look for these two tags, so they stay as they are.
            inside = content.strip()[len(RESPONSE_OPEN) : -len(RESPONSE_CLOSE)]
            marked["content"] = RESPONSE_OPEN + mark(inside) + RESPONSE_CLOSE
        else:
            marked["content"] = mark(content)
        return marked

    def _marked_call(self, call: dict[str, Any]) -> dict[str, Any]:
        mark = self._marker
        function = call["function"]
        arguments = {
            mark.text(key): mark.value(value) for key, value in function["arguments"].items()
        }
        return {**call, "function": {"name": mark.text(function["name"]), "arguments": arguments}}


def _with_past_reasoning(
    messages: list[TemplateMessage], turns: list[str]
) -> list[TemplateMessage]:
    """Replace assistant turns before the last question, which the 3.5 template renders without
    reasoning, by stand-ins; their full text is appended to `turns`."""
    last_query = last_query_index(messages)
    kept: list[TemplateMessage] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index < last_query:
            kept.append(
                {"role": "assistant", "content": turn_mark(len(turns)), "reasoning_content": ""}
            )
            turns.append(render_turn(message))
        else:
            kept.append(message)
    return kept


def _is_empty_assistant(message: TemplateMessage) -> bool:
    return (
        message["role"] == "assistant"
        and not message["content"].strip()
        and not (message.get("reasoning_content") or "").strip()
        and not message.get("tool_calls")
    )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(value: Any, **options: Any) -> str:
    # The engine's own filter escapes < > & ' for HTML, which would change every tool definition.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
