"""Heads: does `<tool_call>` or `<function=` at a place begin a call, or is it text about calls?

A wrapped head (`<tool_call>` first) may name any tool: passing on a wrong name lets the client
report it. A head without its wrapper, or inside reasoning, must name a declared one. Every head
needs evidence: the next thing must be a parameter, a closer or a JSON object. So quoted tags stay
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kslserve.parse.arguments import load_object
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import CLOSERS, Kind, Sign, Tag, begins, next_tag, skip_gap, tag_at

_OPENERS_MAX = 8
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.:/-]*")
_JSON_HEAD = re.compile(r'\{\s{0,64}"(?:name|arguments|parameters)"')
_JSON_HEAD_MAX = 80


@dataclass(frozen=True, slots=True)
class Head:
    """A call begins. end: where its parameters start. alias: the tool's name, if that was the tag.
    arguments: the whole arguments, if the call came as one JSON object, which ends at `end`."""

    shape: ToolShape
    end: int
    alias: str = ""
    arguments: dict[str, Any] | None = None


class JsonScan:
    """Finds the end of a JSON object in growing text, looking at each character once."""

    __slots__ = ("_depth", "_in_string", "_seen")

    _MARKS = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._in_string = False

    def end(self, text: str, start: int) -> int:
        """End of the object at text[start] == "{"; -1 if it is not there yet. `start` may move
        between calls, as long as the text after it only grows."""
        at = start + self._seen
        while (match := self._MARKS.search(text, at)) is not None:
            mark, at = match[0], match.end()
            if mark == "\\":
                if at == len(text):
                    at -= 1
                    break
                at += 1 if self._in_string else 0
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return at
        else:
            at = len(text)
        self._seen = at - start
        return -1


class HeadFinder:
    """Decides about heads for one list of tools. Holds the scan of a JSON call while that grows."""

    __slots__ = ("_scan", "_shapes", "cut")

    def __init__(self, shapes: Mapping[str, ToolShape]):
        self._shapes = shapes
        self._scan: JsonScan | None = None
        self.cut = False  # the output was cut off at its end: nothing there is evidence

    def at(self, text: str, at: int, final: bool, *, in_reasoning: bool) -> Head | Sign:
        """The head that starts at text[at] == "<", WAIT if that is open, else TEXT."""
        tag = tag_at(text, at, final)
        found: Head | Sign = Sign.TEXT
        if tag is Sign.WAIT:
            return tag
        if isinstance(tag, Tag):
            if tag.kind is Kind.CALL_OPEN:
                found = self._wrapped(text, tag.end, final, in_reasoning)
            elif tag.kind is Kind.FUNCTION_OPEN and tag.name in self._shapes and not in_reasoning:
                found = self._evidenced(
                    text, Head(self._shapes[tag.name], tag.end), final, bare=True
                )
        if found is not Sign.WAIT:
            self._scan = None
        return found

    def _wrapped(self, text: str, at: int, final: bool, in_reasoning: bool) -> Head | Sign:
        for _ in range(_OPENERS_MAX):
            at = skip_gap(text, at)
            if at < 0:
                return Sign.TEXT
            if at == len(text):
                return Sign.TEXT if final else Sign.WAIT
            if text[at] == "{":
                return self._json(text, at, final, in_reasoning)
            head = self._named(text, at, final)
            if head is not Sign.TEXT or text[at] != "<":
                break
            tag = tag_at(text, at, final)
            if not isinstance(tag, Tag):
                return tag
            if tag.kind is Kind.FUNCTION_OPEN:
                shape = self._shape(tag.name, in_reasoning)
                head = Sign.TEXT if shape is None else Head(shape, tag.end)
                break
            if tag.kind is not Kind.CALL_OPEN:
                return Sign.TEXT
            at = tag.end
        else:
            return Sign.TEXT
        if isinstance(head, Sign):
            return head
        return self._evidenced(text, head, final, bare=in_reasoning)

    def _shape(self, name: str, in_reasoning: bool) -> ToolShape | None:
        shape = self._shapes.get(name)
        if shape is None and not in_reasoning and _IDENTIFIER.fullmatch(name):
            return ToolShape(name)
        return shape

    def _named(self, text: str, at: int, final: bool) -> Head | Sign:
        """A declared name without `<function=`: as the tag itself, or with the opener's start
        lost."""
        found: Head | Sign = Sign.TEXT
        for name, shape in self._shapes.items():
            for literal, alias in (
                (f"<{name}>", name),
                (f"{name}>", ""),
                (f"function={name}>", ""),
            ):
                if text.startswith(literal, at):
                    return Head(shape, at + len(literal), alias)
                if not final and begins(literal, text, at):
                    found = Sign.WAIT
        return found

    def _evidenced(self, text: str, head: Head, final: bool, *, bare: bool) -> Head | Sign:
        """`head` if what follows it belongs to a call."""
        following = next_tag(text, head.end, final, head.alias)
        if following is Sign.WAIT:
            return following
        if following is Sign.END:
            # The turn ended right after the opener: a call without arguments.
            declared = head.shape.name in self._shapes
            return head if declared and not bare and not self.cut else Sign.TEXT
        if isinstance(following, Tag):
            belongs = following.kind is Kind.PARAM_OPEN or following.kind in CLOSERS
            return head if belongs else Sign.TEXT
        at = skip_gap(text, head.end)
        return head if at >= 0 and text[at] == "{" else Sign.TEXT

    def _json(self, text: str, at: int, final: bool, in_reasoning: bool) -> Head | Sign:
        """A call written as `{"name": ..., "arguments": {...}}`."""
        if _JSON_HEAD.match(text, at) is None:
            open_end = not final and len(text) - at < _JSON_HEAD_MAX
            return Sign.WAIT if open_end and _begins_json_head(text[at:]) else Sign.TEXT
        if self._scan is None:
            self._scan = JsonScan()
        end = self._scan.end(text, at)
        if end < 0:
            return Sign.TEXT if final else Sign.WAIT
        body = load_object(text[at:end]) or {}
        name = body.get("name")
        arguments = body.get("arguments", body.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = load_object(arguments)
        shape = self._shape(name, in_reasoning) if isinstance(name, str) else None
        if shape is None or not isinstance(arguments, dict):
            return Sign.TEXT
        return Head(shape, end, arguments=arguments)


def _begins_json_head(text: str) -> bool:
    rest = text[1:].lstrip()
    return not rest or any(
        key.startswith(rest) for key in ('"name"', '"arguments"', '"parameters"')
    )
