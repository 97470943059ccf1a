"""Messages and tools of a Chat Completions body as core values.

Shapes are checked here; what a template needs beyond them (folding of system turns, order of tool
results) is done when the prompt is rendered. Parts that a text model cannot read become a fixed
placeholder instead of an error, since a client repeats its history for ever.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import orjson

from kslserve.api.choice import ALLOWED, Choice, allowed_choice
from kslserve.api.fields import Fields, noun
from kslserve.core.request import Message, Role, ToolCall, ToolChoice, ToolSpec
from kslserve.errors import InvalidRequest, UnsupportedParameter

IMAGE_OMITTED = "[image omitted: this model reads text only]"
CONTENT_OMITTED = "[content omitted: this model reads text only]"

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_TYPES = ("image_url", "image", "input_image")
# Characters that would end the name inside `<function=NAME>`.
_NAME_BREAKERS = frozenset("<>\n\r")


def messages_of(body: Fields) -> tuple[Message, ...]:
    """The `messages` list. Raises InvalidRequest naming the field at fault."""
    if not body.items("messages"):
        body.refuse("messages", "must be a list with at least one message")
    return tuple(_message(entry) for entry in body.objects("messages"))


def _message(entry: Fields) -> Message:
    name = entry.required_text("role")
    role = _ROLES.get(name)
    if role is None:
        entry.refuse("role", f"must be one of {', '.join(_ROLES)}")
    text = content_text(entry, "content")
    if role is Role.ASSISTANT:
        reasoning = entry.text("reasoning_content")
        if reasoning is None and isinstance(entry.raw("reasoning"), str):
            reasoning = entry.text("reasoning")
        return Message(
            role, text or entry.text("refusal") or "", reasoning, tool_calls=_calls(entry)
        )
    if role is Role.TOOL:
        return Message(role, text, call_id=entry.text("tool_call_id"))
    return Message(role, text)


def content_text(entry: Fields, name: str) -> str:
    """A content field as text: a string, null, or a list of parts joined without a separator."""
    value = entry.raw(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        entry.refuse(name, f"must be a string or a list of parts, not {noun(value)}")
    return "".join(_part(item, f"{entry.at(name)}[{index}]") for index, item in enumerate(value))


def _part(item: Any, path: str) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise InvalidRequest(f"{path} must be an object, not {noun(item)}.", param=path)
    part = Fields(item, path)
    kind = part.text("type") or "text"
    field = _TEXT_FIELDS.get(kind)
    if field is not None:
        return part.required_text(field)
    return IMAGE_OMITTED if kind in _IMAGE_TYPES else CONTENT_OMITTED


def _calls(entry: Fields) -> tuple[ToolCall, ...]:
    calls = []
    for call in entry.objects("tool_calls"):
        function = call.required_object("function")
        calls.append(
            ToolCall(call.text("id") or "", function.required_text("name"), _arguments(function))
        )
    legacy = entry.object("function_call")
    if legacy is not None:
        calls.append(ToolCall("", legacy.required_text("name"), _arguments(legacy)))
    return tuple(calls)


def _arguments(function: Fields) -> dict[str, Any]:
    """The arguments as an object. Text that is no JSON object (a call that was cut off) is kept
    under the key `arguments`, so that history with a broken call stays usable."""
    value = function.raw("arguments")
    if isinstance(value, dict):
        return value
    text = function.text("arguments")
    if text is None or not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def tools_of(body: Fields) -> tuple[ToolSpec, ...]:
    """The `tools` list without hosted ones; an empty one is the same as none."""
    if body.has("functions") or body.has("function_call"):
        name = "functions" if body.has("functions") else "function_call"
        raise UnsupportedParameter(f"{name} is not supported; use tools.", param=name)
    found = [_tool(entry) for entry in body.objects("tools")]
    return tuple(tool for tool in found if tool is not None)


def _tool(entry: Fields) -> ToolSpec | None:
    """One entry of the list; None for a tool that runs on a vendor's servers: it is not offered,
    and asking for it is no error."""
    kind = entry.text("type") or "function"
    if kind == "custom":
        path = entry.at("type")
        raise UnsupportedParameter(f"{path} must be function.", param=path)
    if kind != "function":
        return None
    function = entry.required_object("function")
    name = function.required_text("name")
    if not name or not _NAME_BREAKERS.isdisjoint(name):
        function.refuse("name", "must be a name without angle brackets and line breaks")
    function.text("description")
    parameters = function.object("parameters")
    return ToolSpec(
        name,
        entry.value,
        {} if parameters is None else parameters.value,
        strict=function.boolean("strict") or False,
    )


def tool_choice_of(body: Fields, tools: tuple[ToolSpec, ...]) -> Choice:
    """`tool_choice`. One that only a hosted tool could meet leaves the model free."""
    value = body.raw("tool_choice")
    if value is None:
        return Choice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            body.refuse("tool_choice", "must be auto, none, required, a function or allowed_tools")
        choice = Choice(ToolChoice(value))
    else:
        entry = body.object("tool_choice")
        assert entry is not None
        names = {tool.name for tool in tools}
        kind = entry.text("type")
        if kind == ALLOWED:
            inner = entry.object(ALLOWED) or entry
            return allowed_choice(inner, [_named(tool, names) for tool in inner.objects("tools")])
        if kind != "function":
            if any(tool.text("type") == kind for tool in body.objects("tools")):
                return Choice()
            path = entry.at("type")
            raise UnsupportedParameter(f"{path} must be function or {ALLOWED}.", param=path)
        choice = Choice(ToolChoice.NAMED, _named(entry, names))
    if choice.kind is ToolChoice.REQUIRED and not tools:
        if not body.items("tools"):
            body.refuse("tool_choice", "needs tools")
        return Choice()
    return choice


def _named(entry: Fields, names: Set[str]) -> str:
    """The name of an entry that refers to a declared tool."""
    function = entry.required_object("function")
    name = function.required_text("name")
    if name not in names:
        function.refuse("name", "must name one of the tools")
    return name
