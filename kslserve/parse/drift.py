"""Drift: calls whose tags stray from the format, and the name of a tool at the start of a line.

    <tool_name>T</tool_name> <parameter=k>...      the name in a tag of its own, `<name>` too
    <tool_name></tool_name> <parameter=k>...       no name: the parameters tell the tool
    <name="T", "arguments": {...}}                 the rest of a JSON object behind such a tag
    <function>{"name": "T", ...}</function>        a JSON object in the function
    <parameter=T> <parameter=k>...                 the name in the tag of a parameter
    <parameter=k>...</parameter> </function>       no opener at all
    T", "arguments": {...}}                        a JSON object without its beginning

Where the name is written, it must be that of a declared tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kslserve.parse.head import Family, Head
from kslserve.parse.infer import by_keys
from kslserve.parse.json_calls import HOLD_MAX, JsonCalls, Place
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import Kind, Sign, Tag, begins, next_tag, skip_gap, tag_at

_FUNCTION = "<function>"
_NAME_TAGS = ("<tool_name", "<name")
_NAME_CLOSERS = ("</tool_name>", "</name>", ">")
_NAME = re.compile(r'\s{0,64}"?(?P<name>[A-Za-z_][\w.:/-]{0,127})?"?\s{0,64}')
_LOST = re.compile(r'(?P<name>[A-Za-z_][\w.:/-]{0,127})(?P<rest>"\s{0,8},\s{0,8}")?')
_VALUES_MAX = 64  # closers of parameters looked at in a list without a name
_CLOSE = "</parameter>"


class DriftFinder:
    """For one list of tools."""

    __slots__ = ("_json", "_shapes", "lost_opener")

    def __init__(self, shapes: Mapping[str, ToolShape], json_calls: JsonCalls):
        self._shapes = shapes
        self._json = json_calls
        self.lost_opener = True  # no call yet: an object may have lost its beginning

    def tag(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        """The call that starts with a tag at text[at] == "<"."""
        for begin in _NAME_TAGS:
            if text.startswith(begin, at):
                found = self._named(text, at + len(begin), final, place)
                return _settled(found, final)
        if text.startswith(_FUNCTION, at):
            return _settled(self._json_function(text, at + len(_FUNCTION), final, place), final)
        tag = tag_at(text, at, final)
        if isinstance(tag, Tag) and tag.kind is Kind.PARAM_OPEN:
            return _settled(self._parameter(text, tag, final, place), final)
        if not final and any(begins(mark, text, at) for mark in (*_NAME_TAGS, _FUNCTION)):
            return Sign.WAIT
        return Sign.TEXT

    def lost(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        """The call whose JSON object begins with the tool's name at the start of a line."""
        match = _LOST.match(text, at)
        if match is None or not self.lost_opener:
            return Sign.TEXT
        name = match["name"]
        if match["rest"] is None:
            rest = text[match.end() : match.end() + 20]
            grows = name in self._shapes or match.end() == len(text)
            if final or not grows or re.fullmatch(r'(?:"\s{0,8}(?:,\s{0,8})?)?', rest) is None:
                return Sign.TEXT
            return Sign.WAIT if any(known.startswith(name) for known in self._shapes) else Sign.TEXT
        if name not in self._shapes or not place.may_open():
            return Sign.TEXT
        comma = text.index(",", match.end("name"))
        return self._json.spliced(text, comma, final, place, name, Family.LOST_OPENER)

    def _named(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        """Behind `<tool_name` or `<name`."""
        if at == len(text):
            return Sign.WAIT
        if text[at] not in ">=":
            return Sign.TEXT
        match = _NAME.match(text, at + 1)
        assert match is not None
        name, at = match["name"], match.end()
        if at == len(text):
            return Sign.WAIT
        if name is not None and name not in self._shapes:
            return Sign.TEXT
        for closer in _NAME_CLOSERS:
            if text.startswith(closer, at):
                at += len(closer)
                break
            if begins(closer, text, at):
                return Sign.WAIT
        at = skip_gap(text, at)
        if at < 0 or at == len(text):
            return Sign.TEXT if at < 0 else Sign.WAIT
        if name is not None and text[at] == ",":
            if not place.may_open():
                return Sign.TEXT
            return self._json.spliced(text, at, final, place, name, Family.LOST_OPENER)
        if name is not None and text[at] == "{":
            return Head(self._shapes[name], at, family=Family.OTHER_TAG)
        tag = next_tag(text, at, final)
        if name is not None and isinstance(tag, Tag) and tag.kind is Kind.PARAM_CLOSE:
            tag = next_tag(text, tag.end, final)
        if not isinstance(tag, Tag) or tag.kind is not Kind.PARAM_OPEN:
            return Sign.WAIT if tag is Sign.WAIT else Sign.TEXT
        if name is not None:
            return Head(self._shapes[name], tag.start, family=Family.OTHER_TAG)
        return self._listed(text, tag, final, place, closed=False)

    def _json_function(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        at = skip_gap(text, at)
        if at < 0 or at == len(text):
            return Sign.TEXT if at < 0 else Sign.WAIT
        if text[at] != "{":
            return Sign.TEXT
        found = self._json.at(text, at, final, Place(False, place.strict, place.may_open))
        if isinstance(found, Head) and found.arguments is not None:
            return Head(found.shape, found.end, arguments=found.arguments, family=Family.OTHER_TAG)
        return found

    def _parameter(self, text: str, tag: Tag, final: bool, place: Place) -> Head | Sign:
        """An opener of a parameter where a call should begin."""
        following = next_tag(text, tag.end, final)
        if following is Sign.WAIT:
            return following
        if isinstance(following, Tag) and following.kind is Kind.PARAM_OPEN:
            wanted = tag.name.casefold()
            named = [shape for name, shape in self._shapes.items() if name.casefold() == wanted]
            if tag.name in self._shapes:
                named = [self._shapes[tag.name]]
            if len(named) == 1:
                return Head(named[0], tag.end, family=Family.PARAMETER_OPENER)
        if not any(tag.name in shape.known for shape in self._shapes.values()):
            return Sign.TEXT
        return self._listed(text, tag, final, place, closed=True)

    def _listed(
        self, text: str, tag: Tag, final: bool, place: Place, *, closed: bool
    ) -> Head | Sign:
        """A call known by its parameters only, the first one opened by `tag`. closed: the function
        must be closed behind them."""
        if not self._json.infer or not place.may_open():
            return Sign.TEXT
        keys = self._keys(text, tag, final, closed)
        if isinstance(keys, Sign):
            return keys
        shape = by_keys(keys, self._shapes)
        return Sign.TEXT if shape is None else Head(shape, tag.start, family=Family.PARAMETERS)

    def _keys(self, text: str, tag: Tag, final: bool, closed: bool) -> list[str] | Sign:
        """Names of the parameters of a list, WAIT until its end is there, TEXT if it is none."""
        keys = [tag.name]
        at = opened = tag.end
        for _ in range(_VALUES_MAX):
            close = text.find(_CLOSE, at)
            if (close if close >= 0 else len(text)) - tag.start > HOLD_MAX:
                return Sign.TEXT
            if close < 0:
                # The end of the output closes the last parameter, if that is open.
                ended = final and not closed and not self._json.cut and at == opened
                return keys if ended else Sign.WAIT
            at = close + len(_CLOSE)
            following = next_tag(text, at, final)
            if following is Sign.WAIT:
                return following
            if isinstance(following, Tag):
                if following.kind is Kind.PARAM_OPEN:
                    keys.append(following.name)
                    at = opened = following.end
                elif following.kind in (Kind.FUNCTION_CLOSE, Kind.CALL_CLOSE):
                    return keys
            elif not closed:
                ends = ends_loosely(text, at, final)
                if ends is Sign.WAIT:
                    return ends
                if ends is True:
                    return keys
        return Sign.TEXT


_STRAY = re.compile(r"[}\]]{1,4}")
_NEXT = ("<tool_name>", "<name>", "<function>", "<tool_name=", "<name=")


def ends_loosely(text: str, at: int, final: bool) -> bool | Sign:
    """Does a call that began astray end at `at`, where no tag of the format follows? So do stray
    braces and the end, or the next call of its kind. WAIT if that is open."""
    at = skip_gap(text, at)
    if at < 0:
        return False
    stray = _STRAY.match(text, at)
    if stray is not None:
        at = skip_gap(text, stray.end())
        if at < 0:
            return False
    if at == len(text):
        return True if final else Sign.WAIT
    if stray is not None:
        tag = tag_at(text, at, final) if text[at] == "<" else Sign.TEXT
        if not isinstance(tag, Sign):
            return True
        if tag is Sign.WAIT:
            return tag
    if any(text.startswith(mark, at) for mark in _NEXT):
        return True
    return Sign.WAIT if not final and any(begins(mark, text, at) for mark in _NEXT) else False


def _settled(found: Head | Sign, final: bool) -> Head | Sign:
    """At the end of the output nothing more can be waited for."""
    return Sign.TEXT if final and found is Sign.WAIT else found
