"""FreeValue: where the text of a string parameter ends, while nothing says what it may hold.

The rules are the parser's (`parse.closers`), with one difference: `</parameter>` at the start of a
line, outside of quoted calls, ends the value at once, since what follows is then made to be
structure, and the parser will read it so.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kslserve.parse.closers import Closers
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import Kind, Sign, Tag, tag_at


class FreeValue:
    """One value, from behind its opening tag. given: names of the parameters before it."""

    __slots__ = ("_closers", "_started", "_text")

    def __init__(self, shape: ToolShape, name: str, given: AbstractSet[str]) -> None:
        self._closers = Closers(shape, "", given, loose=False)
        self._closers.begin(name)
        self._text = ""  # not decided yet; holds the line break before it, if there is one
        self._started = False

    def feed(self, text: str) -> str | None:
        """Text behind the value, from the end of its closing tag on or, where that is missing, from
        the tag that ended it. None while the value goes on."""
        self._text += text
        if not self._text:
            return None
        # The line break that the head ended with counts as one before the value.
        if not self._started:
            self._text = "\n" + self._text
            self._started = True
        text, seek = self._text, 0
        while (stop := text.find("<", seek)) >= 0:
            tag = tag_at(text, stop, False)
            if tag is Sign.WAIT:
                break
            starts_line = text[max(stop - 1, 0) : stop] == "\n"
            if starts_line and not self._closers.quoting and _is_closer(tag):
                return text[stop + len(Kind.PARAM_CLOSE.value) :]
            end = self._closers.at(text, stop, 0, False, False)
            if end is Sign.WAIT:
                break
            if isinstance(end, int):
                return text[end:]
            seek = stop + 1
        decided = stop - 1 if stop > 0 and text[stop - 1] == "\n" else stop
        if stop < 0:
            decided = len(text) - text.endswith("\n")
        self._closers.took(text[:decided])
        self._text = text[decided:]
        return None


def _is_closer(tag: Tag | Sign) -> bool:
    return isinstance(tag, Tag) and tag.kind is Kind.PARAM_CLOSE
