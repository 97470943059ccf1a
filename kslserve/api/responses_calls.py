"""Items of calls: of functions, free-form tools and tool searches.

The model writes a free-form tool as a function with one text parameter, so the fragments join to
`{"input": "..."}`. The text is decoded as it comes, never cutting an escape in two. A model that
used another parameter gives its text all the same, once the call is complete.
"""

from __future__ import annotations

import enum
import json
import re
import uuid
from typing import Any

import orjson

from kslserve.api.responses_tools import CUSTOM_PARAMETER, Origin, ToolKind

# Type of a stream event and its own fields, without `type` and `sequence_number`.
Wire = tuple[str, dict[str, Any]]
Json = dict[str, Any]

_OPENING = f'{{"{CUSTOM_PARAMETER}": "'
# Whole characters and escapes; the first half of a surrogate pair only together with the second.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[0-9a-fA-F]{4}|(?=[^\\])|(?=\\[^u]))|\\[^u])*"
)


class _State(enum.Enum):
    OPENING = enum.auto()  # what came may begin the expected parameter
    TEXT = enum.auto()
    DONE = enum.auto()
    OTHER = enum.auto()  # held up to the end


class FreeText:
    """One call. `feed` takes fragments of the arguments, `finish` comes when they have ended; both
    return the text that is new."""

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._held = ""
        self._state = _State.OPENING

    def feed(self, fragment: str) -> str:
        self._held += fragment
        if self._state is _State.OPENING:
            held = self._held
            if held.startswith(_OPENING):
                self._state = _State.TEXT
                self._held = held[len(_OPENING) :]
            elif not _OPENING.startswith(held):
                self._state = _State.OTHER
        if self._state is not _State.TEXT:
            return ""
        match = _WHOLE.match(self._held)
        assert match is not None
        end = match.end()
        raw, self._held = self._held[:end], self._held[end:]
        if self._held.startswith('"'):
            self._state = _State.DONE
        return _decoded(raw)

    def finish(self) -> str:
        if self._state is not _State.OTHER:
            return ""
        return _whole_text(self._held)


def _decoded(raw: str) -> str:
    """Text of the inside of a JSON string, lone surrogates replaced."""
    if "\\" not in raw:
        return raw
    text = json.loads(f'"{raw}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _whole_text(arguments: str) -> str:
    """The text of a call that did not use the one parameter: its only text value, else the
    arguments themselves; nothing for a call without any."""
    try:
        values: Any = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if not isinstance(values, dict) or not values:
        return ""
    text = values.get(CUSTOM_PARAMETER)
    if isinstance(text, str):
        return text
    texts = [value for value in values.values() if isinstance(value, str)]
    return texts[0] if len(values) == len(texts) == 1 else arguments


def new_id(prefix: str) -> str:
    """An id for an item."""
    return prefix + uuid.uuid4().hex


class CallItem:
    """A function call; the other kinds of call differ in what becomes of the arguments."""

    prefix = "fc_"

    def __init__(self, index: int, call_id: str, origin: Origin) -> None:
        self._id = new_id(self.prefix)
        self._call_id = call_id
        self._origin = origin
        self._place: Json = {"item_id": self._id, "output_index": index}
        self._texts: list[str] = []

    def begin(self) -> tuple[Json, list[Wire]]:
        return self._item("in_progress", ""), []

    def delta(self, json: str) -> list[Wire]:
        self._texts.append(json)
        body = {**self._place, "delta": json}
        return [("response.function_call_arguments.delta", body)]

    def end(self, status: str) -> tuple[Json, list[Wire]]:
        text = "".join(self._texts)
        done = {**self._place, "name": self._origin.name, "arguments": text}
        return self._item(status, text), [("response.function_call_arguments.done", done)]

    def _item(self, status: str, arguments: str) -> Json:
        return {**self._head(status), **self._named(), "arguments": arguments}

    def _head(self, status: str) -> Json:
        return {
            "type": self._origin.kind.value,
            "id": self._id,
            "status": status,
            "call_id": self._call_id,
        }

    def _named(self) -> Json:
        named = {"name": self._origin.name}
        if self._origin.namespace is not None:
            named["namespace"] = self._origin.namespace
        return named


class _CustomCall(CallItem):
    """A call of a free-form tool: its one argument is the input."""

    prefix = "ctc_"

    def __init__(self, index: int, call_id: str, origin: Origin) -> None:
        super().__init__(index, call_id, origin)
        self._free = FreeText()

    def delta(self, json: str) -> list[Wire]:
        return self._input(self._free.feed(json))

    def end(self, status: str) -> tuple[Json, list[Wire]]:
        wires = self._input(self._free.finish())
        text = "".join(self._texts)
        wires.append(("response.custom_tool_call_input.done", {**self._place, "input": text}))
        return self._item(status, text), wires

    def _input(self, text: str) -> list[Wire]:
        if not text:
            return []
        self._texts.append(text)
        return [("response.custom_tool_call_input.delta", {**self._place, "delta": text})]

    def _item(self, status: str, arguments: str) -> Json:
        return {**self._head(status), **self._named(), "input": arguments}


class _SearchCall(CallItem):
    """A tool search by the client; it has no events of its own, and its arguments are an object."""

    prefix = "tsc_"

    def delta(self, json: str) -> list[Wire]:
        self._texts.append(json)
        return []

    def end(self, status: str) -> tuple[Json, list[Wire]]:
        return self._item(status, "".join(self._texts)), []

    def _item(self, status: str, arguments: str) -> Json:
        try:
            value = orjson.loads(arguments) if arguments else {}
        except orjson.JSONDecodeError:
            value = {}  # cut off
        return {**self._head(status), "execution": "client", "arguments": value}


_CALLS = {
    ToolKind.FUNCTION: CallItem,
    ToolKind.CUSTOM: _CustomCall,
    ToolKind.SEARCH: _SearchCall,
}


def call_item(index: int, call_id: str, origin: Origin) -> CallItem:
    """The item of a call of a tool."""
    return _CALLS[origin.kind](index, call_id, origin)
