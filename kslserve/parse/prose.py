"""Prose: text for a person, up to where a call or the end of reasoning begins.

Line breaks before either are framing, so the last two of a text are held back, and so is what may
still become a tag. Everything else leaves at once.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from kslserve.core.events import Event
from kslserve.parse.head import Head
from kslserve.parse.tags import Sign

_LEAD_MAX = 64
_BREAKS_MAX = 2


class Lead(enum.Enum):
    """What white space at the start of a section is."""

    TEXT = "the output's own"
    FRAMING = "line breaks are framing"
    GAP = "between two calls, unless text follows"


@dataclass(frozen=True, slots=True)
class Skip:
    """Markup that is not part of the text, up to `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The section ends at `start`, and at `end` the next one begins: a call, or the answer after
    reasoning."""

    start: int
    end: int
    head: Head | None = None


class Prose(ABC):
    """One section. event: makes a delta of text. keep_tail: line breaks at the end of output are
    text."""

    __slots__ = ("_event", "_keep_tail", "_lead", "fresh")

    def __init__(self, event: Callable[[str], Event], lead: Lead, *, keep_tail: bool):
        self._event = event
        self._lead = lead
        self._keep_tail = keep_tail
        self.fresh = True  # only white space so far

    @abstractmethod
    def special(self, text: str, at: int, final: bool) -> Skip | Exit | Sign:
        """What text[at] is: markup, WAIT, or TEXT. Asked for each place that `seek` finds, and for
        the first character of the section if `may_start` says so."""

    def seek(self, text: str, at: int) -> int:
        """The next place that may be special, -1 if there is none."""
        return text.find("<", at)

    def may_start(self, text: str, at: int) -> bool:
        """Whether the section's first character may be special."""
        return text[at] == "<"

    def direct(self, text: str) -> Event:
        """The event of a piece without "<" and line breaks, inside the section's text."""
        return self._event(text)

    def step(self, text: str, final: bool, out: list[Event]) -> tuple[int, Exit | None]:
        """Read on in the unread text: (characters consumed, how the section ended or None)."""
        at = 0
        if self.fresh:
            at, found = self._start(text, final)
            if found is not None:
                return at, found
            if self.fresh:
                return at, None
        seek = at
        while True:
            stop = self.seek(text, seek)
            if stop < 0:
                stop = len(text)
                break
            special = self.special(text, stop, final)
            if special is Sign.WAIT:
                break
            if special is Sign.TEXT:
                seek = stop + 1
                continue
            assert isinstance(special, Skip | Exit)
            if isinstance(special, Exit):
                self._emit(text[at : _without_breaks(text, at, stop)], out)
                return special.end, special
            self._emit(text[at:stop], out)
            at = seek = special.end
        if final:
            end = len(text) if self._keep_tail else _without_breaks(text, at, len(text))
            self._emit(text[at:end], out)
            return len(text), None
        stop = _without_breaks(text, at, stop)
        self._emit(text[at:stop], out)
        return stop, None

    def _start(self, text: str, final: bool) -> tuple[int, Exit | None]:
        """Read white space and markup at the start; `fresh` is False afterwards if text begins."""
        at = 0
        while True:
            if self._lead is Lead.FRAMING:
                at = len(text) - len(text[at:].lstrip("\r\n"))
            end = len(text) - len(text[at:].lstrip(" \t\r\n"))
            if end - at <= _LEAD_MAX:
                if end == len(text):
                    if not final:
                        return at, None
                    self.fresh = self._lead is not Lead.TEXT
                    return (at, None) if not self.fresh else (end, None)
                if self.may_start(text, end):
                    special = self.special(text, end, final)
                    if special is Sign.WAIT:
                        return at, None
                    if isinstance(special, Exit):
                        return special.end, special
                    if isinstance(special, Skip):
                        at = special.end
                        continue
            self.fresh = False
            return at, None

    def _emit(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(self._event(text))


def _without_breaks(text: str, start: int, stop: int) -> int:
    """`stop`, moved before at most two line breaks that end text[start:stop]."""
    for _ in range(_BREAKS_MAX):
        if stop > start and text[stop - 1] == "\n":
            stop -= 1
    return stop
