"""`input` items of a Responses body -> core.Messages.

Consecutive reasoning, assistant message and call items are one assistant turn. Items that mean
nothing to a text model are dropped, not refused, since a client repeats its history for ever; what
was dropped is counted.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from kslserve.api.chat_messages import content_text
from kslserve.api.fields import Fields, noun
from kslserve.api.responses_reasoning import unseal
from kslserve.api.responses_tools import (
    CUSTOM_PARAMETER,
    SEARCH_NAME,
    ToolTable,
    declared_tools,
)
from kslserve.core.request import Message, Role, ToolCall
from kslserve.errors import InvalidRequest

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_SHELL_NAME = "local_shell"
# Where items of unknown kinds may have text.
_TEXT_FIELDS = ("content", "text", "summary", "output")


def input_items(body: Fields) -> list[Fields]:
    """The items of `input`, a string being one user message. Raises InvalidRequest if there are
    none."""
    value = body.raw("input")
    if isinstance(value, str):
        return [Fields({"role": "user", "content": value}, "input")]
    if not isinstance(value, list) or not value:
        body.refuse("input", "must be a string or a list with at least one item")
    items = []
    for index, item in enumerate(value):
        path = f"input[{index}]"
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        elif not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object, not {noun(item)}.", param=path)
        items.append(Fields(item, path))
    return items


def kind_of(item: Fields) -> str:
    """The type of an item; one without is a message."""
    return item.text("type") or "message"


class History:
    """Folds items into messages. dropped: types of the items that were left out."""

    def __init__(self, tools: ToolTable) -> None:
        self._tools = tools
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._text = ""
        self._calls: list[ToolCall] = []
        self._open = False
        self._after_message = False
        self.dropped: list[str] = []

    def add(self, item: Fields) -> None:
        """Take the next item. Raises InvalidRequest naming the field at fault."""
        kind = kind_of(item)
        match kind:
            case "message":
                self._message(item)
            case "reasoning":
                self._reason(_reasoning_text(item))
            case "function_call":
                name = self._tools.shown(item.required_text("name"), item.text("namespace"))
                self._call(item, name, _arguments(item, "arguments"))
            case "custom_tool_call":
                name = self._tools.shown(item.required_text("name"), item.text("namespace"))
                self._call(item, name, {CUSTOM_PARAMETER: item.text("input") or ""})
            case "tool_search_call":
                self._call(item, SEARCH_NAME, _arguments(item, "arguments"))
            case "local_shell_call":
                self._call(item, _SHELL_NAME, _arguments(item, "action"))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._result(item, content_text(item, "output"))
            case "tool_search_output":
                self._result(item, self._loaded(item))
            case "additional_tools":
                pass  # read with the tools
            case _:
                self._unknown(kind, item)

    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        self._close_turn()
        return tuple(self._messages)

    # ------------------------------------------------------------ the assistant's turn

    def _say(self, text: str) -> None:
        """Text of the turn. What a call splits in two was one text when the model wrote it."""
        self._open = True
        gap = "\n\n" if self._after_message and self._text and text else ""
        self._text += gap + text
        self._after_message = True

    def _reason(self, text: str) -> None:
        self._open = True
        self._after_message = False
        if text:
            self._reasoning.append(text)

    def _call(self, item: Fields, name: str, arguments: dict[str, Any]) -> None:
        self._open = True
        self._after_message = False
        call_id = item.text("call_id") or item.text("id") or ""
        self._calls.append(ToolCall(call_id, name, arguments))

    def _close_turn(self) -> None:
        if not self._open:
            return
        reasoning = "\n\n".join(self._reasoning) if self._reasoning else None
        if reasoning is not None or self._text or self._calls:
            calls = tuple(self._calls)
            self._messages.append(Message(Role.ASSISTANT, self._text, reasoning, tool_calls=calls))
        self._reasoning, self._text, self._calls = [], "", []
        self._open = self._after_message = False

    # ------------------------------------------------------------ everything else

    def _message(self, item: Fields) -> None:
        name = item.required_text("role")
        role = _ROLES.get(name)
        if role is None:
            item.refuse("role", f"must be one of {', '.join(_ROLES)}")
        text = content_text(item, "content")
        if role is Role.ASSISTANT:
            self._say(text)
            return
        self._close_turn()
        self._messages.append(Message(role, text))

    def _result(self, item: Fields, text: str) -> None:
        self._close_turn()
        call_id = item.text("call_id") or item.text("id")
        self._messages.append(Message(Role.TOOL, text, call_id=call_id))

    def _loaded(self, item: Fields) -> str:
        """The definitions that a tool search found, one a line, in the form of the tools block."""
        lines = [
            json.dumps(self._tools.definition(tool), ensure_ascii=False)
            for tool in declared_tools(item.objects("tools"))
        ]
        return "\n".join(lines) or content_text(item, "output") or "No tools found."

    def _unknown(self, kind: str, item: Fields) -> None:
        """An item of a kind that we do not know: its text, where it has one."""
        text = "".join(_loose_text(item.raw(name)) for name in _TEXT_FIELDS).strip()
        if not text:
            self.dropped.append(kind)
            return
        role = item.raw("role")
        if isinstance(role, str) and role in _ROLES:
            self._message(Fields({"role": role, "content": text}, item.path))
            return
        self._close_turn()
        self._messages.append(Message(Role.SYSTEM, f"[{kind}]\n{text}"))


def _reasoning_text(item: Fields) -> str:
    """The exact text from our own `encrypted_content`, else the visible one."""
    sealed = item.text("encrypted_content")
    exact = unseal(sealed) if sealed else None
    if exact is not None:
        return exact
    for name in ("content", "summary"):
        parts = [part.text("text") or "" for part in item.objects(name)]
        text = "\n\n".join(part for part in parts if part)
        if text:
            return text
    return ""


def _arguments(item: Fields, name: str) -> dict[str, Any]:
    """An object, or its JSON text. Other text (a call that was cut off) is kept under the key
    `arguments`, so that history with a broken call stays usable."""
    value = item.raw(name)
    if isinstance(value, dict):
        return value
    text = item.text(name)
    if text is None or not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}


def _loose_text(value: object) -> str:
    """Text of a field of unknown shape."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_loose_text(part) for part in value)
    return _loose_text(value.get("text")) if isinstance(value, dict) else ""
