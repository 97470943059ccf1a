"""JsonCalls: a call written as a JSON object, complete, damaged or with its beginning lost.

An object is held from the moment its first key and the tool's name say that it may be a call, until
its end is there; one that needs its end guessed, until the model has ended its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kslserve.parse.head import Family, Head, JsonScan
from kslserve.parse.infer import ARGUMENT_KEYS, NAME_KEYS, Meant, meant
from kslserve.parse.jsonish import Broken, read_object
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import Kind, Sign, Tag, begins, next_tag, skip_gap, tag_at

HOLD_MAX = 1 << 18  # characters held for one call
_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "tool_call", "type")
_WORD = re.compile(r"[a-z_]{0,16}")
_NAME = re.compile(r"[A-Za-z_][\w.:/-]{0,127}")
_QUOTED = re.compile(r'[^"\\\n]{0,128}')
_TO_PARAMETERS = re.compile(
    r'\s{0,64},?\s{0,64}(?:"?(?:arguments|parameters|input)"\s{0,16}:\s{0,16}\{?)?\s{0,64}'
)
_FUNCTION = '"function"'
_FOLLOWERS = ("<tool_call>", "<tool_name>", "<name>", "<function", "</")


@dataclass(frozen=True, slots=True)
class Place:
    """What stands around a possible call. wrapped: behind `<tool_call>`, so a tool may be one that
    is not declared. strict: it must be well-formed JSON (in reasoning). may_open: whether a call
    may be recovered there."""

    wrapped: bool
    strict: bool
    may_open: Callable[[], bool]


class JsonCalls:
    """For one list of tools. Holds the scan of an object while that grows."""

    __slots__ = ("_scan", "_shapes", "cut", "infer")

    def __init__(self, shapes: Mapping[str, ToolShape]):
        self._shapes = shapes
        self._scan: JsonScan | None = None
        self.cut = False  # the output was cut off, which is not the model's end
        self.infer = True

    def reset(self) -> None:
        """The next question is about another place."""
        self._scan = None

    def at(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        """The call that the object at text[at] == "{" is, WAIT or TEXT."""
        name_end = self._signature(text, at, place)
        if isinstance(name_end, Sign):
            return Sign.TEXT if final else name_end
        if not place.may_open():
            return Sign.TEXT
        name, end = name_end
        if name in self._shapes and not place.strict:
            chimera = self._to_parameters(text, end)
            if chimera is Sign.WAIT and final:
                chimera = Sign.TEXT
            if isinstance(chimera, int):
                return Head(self._shapes[name], chimera, family=Family.CHIMERA)
            if chimera is Sign.WAIT:
                return chimera
        return self._object(text, at, final, place)

    def spliced(
        self, text: str, at: int, final: bool, place: Place, name: str, family: Family
    ) -> Head | Sign:
        """The call whose object has lost everything before text[at] == "," but its name."""
        begin = f'{{"name": {json.dumps(name)}'
        found = self._object(begin + text[at:], 0, final, place, family)
        if not isinstance(found, Head):
            return found
        end = found.end - len(begin) + at
        return Head(found.shape, end, arguments=found.arguments, family=family)

    def _object(
        self, text: str, at: int, final: bool, place: Place, family: Family | None = None
    ) -> Head | Sign:
        if self._scan is None:
            self._scan = JsonScan()
        end = self._scan.end(text, at)
        if (end if end >= 0 else len(text)) - at > HOLD_MAX:
            return Sign.TEXT
        ended = final and not self.cut and not place.strict
        if end < 0:
            return self._read(text, at, -1, final, place, family) if ended else _later(final)
        if not self._scan.broken:
            try:
                return self._read(text, at, end, final, place, family)
            except Broken as fault:
                if place.strict or not fault.in_text:
                    return Sign.TEXT
                self._scan.broken = True
        return self._read(text, at, -1, final, place, family) if ended else _later(final)

    def _read(
        self, text: str, at: int, stop: int, final: bool, place: Place, family: Family | None
    ) -> Head | Sign:
        """The call in text[at:stop], or in all there is. Raises Broken where `stop` is given."""
        clean = True
        try:
            if stop < 0:
                raise ValueError
            value, end = json.loads(text[at:stop], parse_constant=_no_constant), stop
        except (ValueError, RecursionError):
            clean = False
            try:
                value, end = read_object(text, at, self._shapes, stop=stop, ended=stop < 0)
            except Broken:
                if stop >= 0:
                    raise
                return Sign.TEXT
        found = meant(value, self._shapes, infer=self.infer and not place.strict)
        if found is None or not self._allowed(found, place):
            return Sign.TEXT
        shape = found.shape or ToolShape(found.name)
        if not found.arguments and not place.strict:
            # After a cut its arguments may have been to come.
            following = next_tag(text, end, final and not self.cut)
            if following is Sign.WAIT:
                return _later(final)
            if isinstance(following, Tag) and following.kind is Kind.PARAM_OPEN:
                return Head(shape, end, family=Family.CHIMERA)
        if not place.wrapped:
            followed = _is_followed(text, end, final)
            if isinstance(followed, Sign):
                return followed
        if family is None:
            family = Family.JSON if clean else Family.JSON_REPAIRED
            family = Family.JSON_INFERRED if found.inferred else family
        return Head(shape, end, arguments=found.arguments, family=family)

    def _allowed(self, found: Meant, place: Place) -> bool:
        if found.shape is not None:
            return True
        return place.wrapped and not place.strict and _NAME.fullmatch(found.name) is not None

    def _signature(self, text: str, at: int, place: Place) -> tuple[str, int] | Sign:
        """(name of the tool if it comes first, where the text after it starts) if the object at
        `at` may be a call. In growing text an answer other than WAIT does not change."""
        at = skip_gap(text, at + 1)
        if at < 0 or at == len(text):
            return Sign.TEXT if at < 0 else Sign.WAIT
        at += text[at] == '"'
        word = _WORD.match(text, at)
        key = "" if word is None else word[0]
        at += len(key)
        if at == len(text):
            return Sign.WAIT if any(known.startswith(key) for known in _KEYS) else Sign.TEXT
        if key not in _KEYS or text[at] != '"':
            return Sign.TEXT
        for mark in (":", ""):
            at = skip_gap(text, at + 1)
            if at < 0 or at == len(text):
                return Sign.TEXT if at < 0 else Sign.WAIT
            if mark and text[at] != mark:
                return Sign.TEXT
        if key == "type":
            if not text.startswith(_FUNCTION, at):
                return Sign.WAIT if begins(_FUNCTION, text, at) else Sign.TEXT
            return "", at
        if text[at] == "{":
            return "", at
        if key not in NAME_KEYS:
            return ("", at) if text[at] == '"' and key != "tool_call" else Sign.TEXT
        return self._name(text, at, place)

    def _name(self, text: str, at: int, place: Place) -> tuple[str, int] | Sign:
        """A tool's name as the value at `at`, with or without quotes."""
        quoted = text[at] == '"'
        match = (_QUOTED if quoted else _NAME).match(text, at + quoted)
        if match is None:
            return Sign.TEXT
        name, end = match[0], match.end()
        if end == len(text):
            return Sign.WAIT
        if quoted:
            if text[end] != '"':
                return Sign.TEXT
            end += 1
        if name in self._shapes or (place.wrapped and quoted and not place.strict):
            return name, end
        return Sign.TEXT

    def _to_parameters(self, text: str, at: int) -> int | Sign:
        """Where parameters begin behind the name of a tool, in place of its arguments."""
        match = _TO_PARAMETERS.match(text, at)
        at = at if match is None else match.end()
        if at == len(text) or text[at] != "<":
            return Sign.TEXT  # the object decides, or there is more to come
        tag = tag_at(text, at, False)
        if isinstance(tag, Tag):
            return at if tag.kind is Kind.PARAM_OPEN else Sign.TEXT
        return tag


def _is_followed(text: str, at: int, final: bool) -> bool | Sign:
    """True if nothing but more calls or closers comes behind a bare call, else WAIT or TEXT."""
    at = skip_gap(text, at)
    if at < 0:
        return Sign.TEXT
    if at == len(text):
        return True if final else Sign.WAIT
    if text[at] == "{" or any(text.startswith(mark, at) for mark in _FOLLOWERS):
        return True
    if not final and any(begins(mark, text, at) for mark in _FOLLOWERS):
        return Sign.WAIT
    return Sign.TEXT


def _later(final: bool) -> Sign:
    return Sign.TEXT if final else Sign.WAIT


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
