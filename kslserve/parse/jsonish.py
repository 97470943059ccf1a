"""Jsonish: an object that was meant to be JSON, read with the repairs that models make needed.

Repaired are: raw control characters and lone backslashes in strings, a lost opening quote of a key,
a tool's name without quotes, a value as `<content>...</content>`, an end that is missing because
the output ended, and one long string whose own quotes were not escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

from kslserve.parse.infer import NAME_KEYS

_DEPTH_MAX = 32
_BODY = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_DANGLING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'([A-Za-z_]\w{0,63})"(?=\s{0,64}:)')
_LITERAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])|[A-Za-z]\w*(?!\w)")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NAME = re.compile(r"[A-Za-z_][\w.:/-]{0,127}")
_TAG = re.compile(r"<([A-Za-z_]\w{0,63})>")
_OVER = re.compile(r"</(?:tool_call|function)|\Z")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|["\\]')
_GAP = r"\s{0,64}"
_SCALAR = (
    rf'{_GAP},{_GAP}"\w{{1,64}}"{_GAP}:{_GAP}(?:true|false|null|-?\d{{1,20}}(?:\.\d{{1,20}})?)'
)
_LONG_END = re.compile(
    rf'"(?P<more>(?:{_SCALAR}){{0,8}}){_GAP}(?:\}}{_GAP}){{1,4}}(?:</\w{{1,64}}>{_GAP}){{0,4}}\Z'
)
_REGION_END = re.compile(
    rf'\}}{_GAP}(?=</?tool_call>|\n[ \t]{{0,64}}\{{{_GAP}"(?:name|function|tool|tool_name)"{_GAP}:)'
)


class Broken(Exception):
    """Not an object that could be read. in_text: a string value of an object inside the object had
    begun, so the fault may be in a long text."""

    def __init__(self, in_text: bool = False):
        super().__init__()
        self.in_text = in_text


def read_object(
    text: str, at: int, names: Container[str], *, stop: int = -1, ended: bool = False
) -> tuple[dict[str, Any], int]:
    """(object that starts at text[at] == "{", where it ends). names: may stand without quotes.

    stop: the object must end there; -1: wherever. ended: the model ended its turn where the text
    ends, so missing closers are supplied and one string may run to the last quote. Raises Broken.
    """
    reader = _Reader(text if stop < 0 else text[:stop], at, names, ended)
    try:
        value = reader.object(None, 0)
    except _Fault:
        if ended and reader.long is not None:
            return reader.long_string()
        raise Broken(reader.long is not None) from None
    if stop >= 0 and reader.at != stop:
        raise Broken(reader.long is not None)
    return value, reader.at


class _Fault(Exception):
    pass


class _Reader:
    def __init__(self, text: str, at: int, names: Container[str], ended: bool):
        self.text = text
        self.at = at
        self._start = at
        self._names = names
        self._ended = ended
        self._top: dict[str, Any] = {}
        # The last string value of an inner object: the object, its key, where the text begins.
        self.long: tuple[dict[str, Any], str, int] | None = None

    def object(self, into: dict[str, Any] | None, depth: int) -> dict[str, Any]:
        """The object at "{". It is filled in place, so that a later fault finds what there was."""
        found = self._top if into is None else into
        if depth > _DEPTH_MAX:
            raise _Fault
        self.at += 1
        while True:
            self._space()
            if self._over():
                return found
            if self.text[self.at] == "}":
                self.at += 1
                return found
            key = self._key()
            if key is None:
                return found
            if self._take(":"):
                return found
            self._value(found, key, depth)
            self._space()
            if self._over():
                return found
            if self.text[self.at] not in ",}":
                raise _Fault
            self.at += self.text[self.at] == ","

    def long_string(self) -> tuple[dict[str, Any], int]:
        """Everything, with the last string value run to the last quote before the end."""
        assert self.long is not None
        found, key, start = self.long
        region = _REGION_END.search(self.text, start)
        text = self.text[: region.end()] if region else self.text
        end = _LONG_END.search(text, start)
        if end is None:
            raise Broken
        more = json.loads("{" + end["more"].strip().removeprefix(",") + "}")
        found[key] = _unescaped(text[start : end.start()])
        found.update((name, value) for name, value in more.items() if name not in found)
        return self._top, len(text.rstrip()) if not region else len(text)

    def _value(self, into: dict[str, Any], key: str, depth: int) -> None:
        """A member's value, put under its key unless the output ended before it."""
        self._space()
        if self._over():
            return
        mark = self.text[self.at]
        if mark == "{":
            into[key] = {}
            self.object(into[key], depth + 1)
        elif mark == '"':
            if depth > 0:
                self.long = (into, key, self.at + 1)
            into[key] = self._string(key)
        else:
            into[key] = self._other(key, depth)

    def _other(self, key: str, depth: int) -> Any:
        if self.text[self.at] == "[":
            return self._array(depth + 1)
        tagged = _TAG.match(self.text, self.at)
        if tagged is not None:
            self.at = tagged.end()
            return self._raw(tagged[1], opened=True)
        if key in NAME_KEYS and (name := _NAME.match(self.text, self.at)) is not None:
            if name[0] not in self._names:
                raise _Fault
            self.at = name.end()
            return name[0]
        literal = _LITERAL.match(self.text, self.at)
        if literal is None or (literal[0][0].isalpha() and literal[0] not in _WORDS):
            raise _Fault
        self.at = literal.end()
        if literal[0] in _WORDS:
            return _WORDS[literal[0]]
        try:
            return json.loads(literal[0])
        except ValueError:  # more digits than Python converts
            raise _Fault from None

    def _array(self, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise _Fault
        items: list[Any] = []
        self.at += 1
        while True:
            self._space()
            if self._over():
                return items
            if self.text[self.at] == "]":
                self.at += 1
                return items
            if self.text[self.at] == "{":
                item: dict[str, Any] = {}
                items.append(item)
                self.object(item, depth + 1)
            elif self.text[self.at] == '"':
                items.append(self._string(""))
            else:
                items.append(self._other("", depth))
            self._space()
            if self._over():
                return items
            if self.text[self.at] not in ",]":
                raise _Fault
            self.at += self.text[self.at] == ","

    def _key(self) -> str | None:
        """A key, None if the output ended in it."""
        if self.text[self.at] == '"':
            key = self._string("")
            return None if self.at == len(self.text) else key
        lost = _KEY.match(self.text, self.at)
        if lost is None:
            raise _Fault
        self.at = lost.end()
        return lost[1]

    def _string(self, key: str) -> str:
        """The string at its opening quote."""
        start = self.at + 1
        match = _BODY.match(self.text, start)
        end = start if match is None else match.end()
        if end < len(self.text) and self.text[end] == '"':
            self.at = end + 1
            self._space()
            if self.at == len(self.text) or self.text[self.at] in ",}]:":
                return _unescaped(self.text[start:end])
            if self.text[self.at] == "<" and self._over():
                return _unescaped(self.text[start:end])
        elif self._ended and (end == len(self.text) or _DANGLING.match(self.text, end)):
            if key and f"</{key}>" in self.text[start:]:
                self.at = start
                return self._raw(key, opened=False)
            self.at = len(self.text)
            return _unescaped(self.text[start:end])
        if key and f"</{key}>" in self.text[start:]:
            self.at = start
            return self._raw(key, opened=False)
        raise _Fault

    def _raw(self, tag: str, *, opened: bool) -> str:
        """Text up to the closing tag after which the object goes on. opened: by the same tag, so
        the end of the output may close it, too."""
        start = self.at
        close = re.compile(rf'</{re.escape(tag)}>{_GAP}"?(?={_GAP}(?:[,}}\]]|\Z))')
        match = close.search(self.text, start)
        if match is None:
            if not (self._ended and opened):
                raise _Fault
            self.at = len(self.text)
            return self.text[start:]
        self.at = match.end()
        return self.text[start : match.start()]

    def _take(self, mark: str) -> bool:
        """Read a mark; True if the output ends before it."""
        self._space()
        if self._over():
            return True
        if self.text[self.at] != mark:
            raise _Fault
        self.at += 1
        return False

    def _over(self) -> bool:
        """Does the output end here, or do the closers of a call follow?"""
        if _OVER.match(self.text, self.at) is None:
            return False
        if not self._ended:
            raise _Fault
        return True

    def _space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = self.at if match is None else match.end()


def _unescaped(body: str) -> str:
    """Text of a string's body. Valid escapes count; other quotes and backslashes stand for
    themselves."""
    try:
        found: str = json.loads(f'"{body}"', strict=False)
    except ValueError:
        repaired = _ESCAPE.sub(
            lambda match: match[0] if len(match[0]) > 1 else "\\" + match[0], body
        )
        found = json.loads(f'"{repaired}"', strict=False)
    return found
