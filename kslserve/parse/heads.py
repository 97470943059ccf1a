"""Heads: does what stands at a place begin a call, or is it text about calls?

A wrapped head (`<tool_call>` first) may name any tool: passing on a wrong name lets the client
report it. A head without its wrapper, or inside reasoning, must name a declared one, and outside of
reasoning it must start a line. Every head needs evidence: the next thing must be a parameter, a
closer or a JSON object. So quoted tags stay text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kslserve.parse.drift import DriftFinder
from kslserve.parse.guards import Surroundings
from kslserve.parse.head import Family, Head
from kslserve.parse.json_calls import JsonCalls, Place
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import CLOSERS, Kind, Sign, Tag, begins, next_tag, skip_gap, tag_at

_OPENERS_MAX = 8
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.:/-]*")
_OPENERS = ("<function=", "<function ", "<function>", "<parameter=", "<parameter ", "<tool_name",
            "<name>", "<name=")  # fmt: skip
_PLAIN_OPENER = re.compile(r"<function=[^\"'\s>]")


class HeadFinder:
    """Decides about heads for one list of tools. recover: calls that stray from the format count,
    too."""

    __slots__ = ("_drift", "_json", "_recover", "_shapes")

    def __init__(self, shapes: Mapping[str, ToolShape], *, recover: bool = True):
        self._shapes = shapes
        self._recover = recover
        self._json = JsonCalls(shapes)
        self._drift = DriftFinder(shapes, self._json)

    def cut_off(self) -> None:
        """The output was cut off at its end: nothing there is evidence."""
        self._json.cut = True

    def found(self) -> None:
        """A call has begun."""
        self._drift.lost_opener = False

    def in_reasoning(self, text: str, at: int, final: bool) -> Head | Sign:
        """The head that starts at text[at] == "<", WAIT if that is open, else TEXT."""
        tag = tag_at(text, at, final)
        if not isinstance(tag, Tag) or tag.kind is not Kind.CALL_OPEN:
            return tag if tag is Sign.WAIT else Sign.TEXT
        return self._decided(self._wrapped(text, tag.end, final, Place(True, True, _always)))

    def in_answer(self, text: str, at: int, final: bool, surroundings: Surroundings) -> Head | Sign:
        """The same for the answer, also for what may begin a call without "<" there. surroundings:
        of text[at]."""
        found: Head | Sign = Sign.TEXT
        starts_line, may_open = surroundings.starts_line, surroundings.open
        if text[at] != "<" and not starts_line:
            pass
        elif text[at] != "<":
            place = Place(False, False, may_open)
            if self._recover and text[at] == "{":
                found = self._json.at(text, at, final, place)
            elif self._recover:
                found = self._drift.lost(text, at, final, place)
        else:
            tag = tag_at(text, at, final)
            if isinstance(tag, Tag) and tag.kind is Kind.CALL_OPEN:
                found = self._wrapped(text, tag.end, final, Place(True, False, may_open))
            elif isinstance(tag, Tag) and tag.kind is Kind.FUNCTION_OPEN:
                found = self._function(text, tag, final) if starts_line else Sign.TEXT
            elif tag is Sign.WAIT:
                found = tag
            elif starts_line and self._recover:
                found = self._drift.tag(text, at, final, Place(False, False, may_open))
            if found is Sign.TEXT and self._json.infer:
                # Whoever talks about openers does not forget them.
                if any(text.startswith(opener, at) for opener in _OPENERS):
                    self._json.infer = not may_open()
                elif not final and any(begins(opener, text, at) for opener in _OPENERS):
                    found = Sign.WAIT
        if isinstance(found, Head) and found.family is not None and not may_open():
            found = Sign.TEXT
        return self._decided(found)

    def _decided(self, found: Head | Sign) -> Head | Sign:
        if found is not Sign.WAIT:
            self._json.reset()
        return found

    def _function(self, text: str, tag: Tag, final: bool) -> Head | Sign:
        """`<function=` without a wrapper."""
        shape = self._shapes.get(tag.name)
        if shape is None or not self._recover:
            return Sign.TEXT
        head = Head(shape, tag.end, family=Family.BARE_FUNCTION)
        return self._evidenced(text, head, final, bare=True)

    def _wrapped(self, text: str, at: int, final: bool, place: Place) -> Head | Sign:
        for _ in range(_OPENERS_MAX):
            at = skip_gap(text, at)
            if at < 0:
                return Sign.TEXT
            if at == len(text):
                return Sign.TEXT if final else Sign.WAIT
            if text[at] == "{":
                return self._json.at(text, at, final, place)
            head = self._named(text, at, final)
            if head is not Sign.TEXT or text[at] != "<":
                break
            tag = tag_at(text, at, final)
            if not isinstance(tag, Tag):
                drifts = self._recover and tag is Sign.TEXT and not place.strict
                return self._drift.tag(text, at, final, place) if drifts else tag
            if tag.kind is Kind.FUNCTION_OPEN:
                head = self._opened(text, tag, place)
                break
            if tag.kind is Kind.PARAM_OPEN and self._recover and not place.strict:
                return self._drift.tag(text, at, final, place)
            if tag.kind is not Kind.CALL_OPEN:
                return Sign.TEXT
            at = tag.end
        else:
            return Sign.TEXT
        if head is Sign.TEXT and self._recover and not place.strict and text[at] != "<":
            return self._drift.lost(text, at, final, place)
        if isinstance(head, Sign):
            return head
        return self._evidenced(text, head, final, bare=place.strict)

    def _opened(self, text: str, tag: Tag, place: Place) -> Head | Sign:
        """A wrapped `<function=`."""
        family = None if _PLAIN_OPENER.match(text, tag.start) else Family.OTHER_TAG
        shape = self._shapes.get(tag.name)
        if shape is not None:
            return Head(shape, tag.end, family=family)
        if place.strict or _IDENTIFIER.fullmatch(tag.name) is None:
            return Sign.TEXT
        self._json.infer = False
        return Head(ToolShape(tag.name), tag.end)

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
                    return Head(shape, at + len(literal), alias, family=Family.OTHER_TAG)
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
            return head if declared and not bare and not self._json.cut else Sign.TEXT
        if isinstance(following, Tag):
            belongs = following.kind is Kind.PARAM_OPEN or following.kind in CLOSERS
            return head if belongs else Sign.TEXT
        at = skip_gap(text, head.end)
        return head if at >= 0 and text[at] == "{" else Sign.TEXT


def _always() -> bool:
    return True
