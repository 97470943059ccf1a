"""Closers: does a tag inside a value end it, or is it part of it?

The format has no escaping, so a value may hold text that reads like its end. A closer counts only
if the structure goes on behind it: `</parameter>` before another tag of the call, `</function>`
before `</tool_call>`, and all of them at the end of the output. Where a value quotes a whole call
(its opener starts a line), the quoted closers are counted off first. Missing closers are supplied:
a line that opens a declared parameter not given yet ends the value before it, and the end of the
output ends everything.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kslserve.parse.drift import ends_loosely
from kslserve.parse.schema import ToolShape
from kslserve.parse.tags import CLOSERS, Kind, Sign, Tag, next_tag, tag_at

_OPENER = "<tool_call>"
_TAIL_MAX = len(_OPENER) + 4
_CHAIN_MAX = 8  # closers in a row that are looked at; a longer chain is text


class Closers:
    """The rule for one call. given: names of the arguments so far, kept by the owner. loose: the
    call began astray, so it may end so, too."""

    __slots__ = ("_alias", "_given", "_loose", "_name", "_quoted", "_shape", "_tail")

    def __init__(self, shape: ToolShape, alias: str, given: AbstractSet[str], *, loose: bool):
        self._loose = loose
        self._shape = shape
        self._alias = alias
        self._given = given
        self.begin("")

    def begin(self, name: str) -> None:
        """A value starts."""
        self._name = name
        self._tail = ""  # the last characters taken of the value
        # Quoted openers that are not closed yet, by what closes them.
        self._quoted = dict.fromkeys((Kind.PARAM_CLOSE, Kind.FUNCTION_CLOSE, Kind.CALL_CLOSE), 0)

    def took(self, piece: str) -> None:
        """The next piece of the value, as far as it is decided."""
        self._tail = (self._tail + piece)[-_TAIL_MAX:]

    def at(self, text: str, at: int, start: int, final: bool, cut: bool) -> int | Sign:
        """Where reading goes on if the value ends at text[at] == "<"; WAIT; TEXT if it does not.

        start: where the part of the value begins that was not given to `took`. Called once for each
        place that is not WAIT, in order. cut: the output ends after the text, not by the model's
        will.
        """
        tag = tag_at(text, at, final, self._alias)
        if not isinstance(tag, Tag):
            return tag
        ends: bool | Sign = False
        if tag.kind in CLOSERS:
            if tag.kind is Kind.PARAM_CLOSE:
                ends = self._parameter_close(text, tag.end, final, cut)
            elif tag.kind is Kind.FUNCTION_CLOSE:
                ends = self._function_close(text, tag.end, final)
            else:
                ends = self._output_over(text, tag.end, final)
            if ends is False and self._quoted[tag.kind]:
                self._quoted[tag.kind] -= 1
        elif self._starts_line(text, at, start):
            ends = tag.kind is Kind.PARAM_OPEN and not self._in_quote() and self._is_new(tag.name)
            if not ends:
                self._quote(tag.kind, text, at, start)
        if ends is Sign.WAIT:
            return ends
        if ends is False:
            return Sign.TEXT
        return tag.end if tag.kind is Kind.PARAM_CLOSE else at

    def _parameter_close(self, text: str, at: int, final: bool, cut: bool) -> bool | Sign:
        """Does `</parameter>` before `at` end the value?"""
        quoted = self._in_quote()
        following = next_tag(text, at, final, self._alias)
        if following is Sign.TEXT and self._loose and not quoted:
            return ends_loosely(text, at, final)
        if not isinstance(following, Tag):
            return following if following is Sign.WAIT else following is Sign.END
        if following.kind is Kind.PARAM_OPEN:
            return not quoted or self._is_new(following.name)
        if following.kind is Kind.CALL_OPEN:
            return not quoted
        if following.kind is Kind.FUNCTION_CLOSE and not quoted:
            after = next_tag(text, following.end, final, self._alias)
            if after is Sign.WAIT:
                return cut or after
            if isinstance(after, Tag):
                return after.kind is not Kind.PARAM_CLOSE
            return after is Sign.END
        if following.kind in (Kind.FUNCTION_CLOSE, Kind.CALL_CLOSE):
            return self._output_over(text, following.end, final)
        return False

    def _function_close(self, text: str, at: int, final: bool) -> bool | Sign:
        """Does `</function>` before `at`, with no `</parameter>` before it, end the value?"""
        following = next_tag(text, at, final, self._alias)
        if isinstance(following, Tag):
            if following.kind is not Kind.CALL_CLOSE:
                return False
            return self._output_over(text, following.end, final)
        return following if following is Sign.WAIT else following is Sign.END

    def _output_over(self, text: str, at: int, final: bool) -> bool | Sign:
        """Is there nothing at `at` but closers of calls, or the next call?"""
        for _ in range(_CHAIN_MAX):
            following = next_tag(text, at, final, self._alias)
            if not isinstance(following, Tag):
                return following if following is Sign.WAIT else following is Sign.END
            if following.kind is Kind.CALL_OPEN:
                return not self._in_quote()
            if following.kind not in (Kind.FUNCTION_CLOSE, Kind.CALL_CLOSE):
                return False  # a later `</parameter>` is the value's own
            at = following.end
        return False

    @property
    def quoting(self) -> bool:
        """The value is inside a call that it quotes."""
        return self._in_quote()

    def _in_quote(self) -> bool:
        return any(self._quoted.values())

    def _is_new(self, name: str) -> bool:
        """A declared parameter that is not given yet."""
        return name in self._shape.known and name not in self._given and name != self._name

    def _starts_line(self, text: str, at: int, start: int) -> bool:
        before = self._before(text, at, start)
        return not before or before.endswith(("\n", _OPENER))

    def _quote(self, kind: Kind, text: str, at: int, start: int) -> None:
        """Count an opener that is part of the value, to count off its closer."""
        if kind is Kind.PARAM_OPEN:
            self._quoted[Kind.PARAM_CLOSE] += 1
        elif kind is Kind.FUNCTION_OPEN:
            self._quoted[Kind.FUNCTION_CLOSE] += 1
            # `<tool_call>` alone is as likely a word as an opener.
            if self._before(text, at, start).rstrip().endswith(_OPENER):
                self._quoted[Kind.CALL_CLOSE] += 1

    def _before(self, text: str, at: int, start: int) -> str:
        """The last characters of the value before text[at]."""
        return self._tail + text[max(start, at - _TAIL_MAX) : at]
