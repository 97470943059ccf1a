"""Answer: visible text, outside of reasoning and calls."""

from __future__ import annotations

import re

from kslserve.core.events import Event, TextDelta
from kslserve.parse.guards import Surroundings
from kslserve.parse.heads import HeadFinder
from kslserve.parse.prose import Exit, Lead, Prose, Skip
from kslserve.parse.reasoning import THINK_CLOSE
from kslserve.parse.tags import CLOSERS, Sign, Tag, begins, tag_at

# What may begin a call at the start of a line: an object, or the name of a tool and a quote.
_BEGIN = r"(?:\{|[A-Za-z_][\w.:/-]{0,127}(?:\"|\Z))"
# Of all tags only a few are of interest in the middle of text, by their first letter.
_PLACE = re.compile(rf"<(?=/?(?:[tfpn]|\Z))|\n(?= {{0,3}}(?:\Z|{_BEGIN}))")
_START = re.compile(rf"<|{_BEGIN}")


class Answer(Prose):
    """surroundings: of all visible text so far. thinking_unclosed: a call ended the reasoning, so
    its `</think>` may still come, and is no text."""

    __slots__ = ("_after_call", "_heads", "_seen", "_surroundings", "_thinking_unclosed")

    def __init__(
        self,
        heads: HeadFinder,
        surroundings: Surroundings,
        lead: Lead,
        *,
        thinking_unclosed: bool = False,
    ):
        super().__init__(TextDelta, lead, keep_tail=True)
        self._heads = heads
        self._surroundings = surroundings
        self._seen = 0  # how much of the unread text the surroundings know
        self._after_call = lead is Lead.GAP
        self._thinking_unclosed = thinking_unclosed

    def step(self, text: str, final: bool, out: list[Event]) -> tuple[int, Exit | None]:
        used, end = super().step(text, final, out)
        self._advance(text, used if end is None else end.start)
        self._seen = max(0, self._seen - used)
        return used, end

    def seek(self, text: str, at: int) -> int:
        match = _PLACE.search(text, at)
        return -1 if match is None else match.start()

    def may_start(self, text: str, at: int) -> bool:
        return _START.match(text, at) is not None

    def direct(self, text: str) -> Event:
        self._surroundings.took(text)
        return TextDelta(text)

    def special(self, text: str, at: int, final: bool) -> Skip | Exit | Sign:
        place = at
        if text[at] == "\n":
            place = at + 1
            while place < len(text) and text[place] == " ":
                place += 1
            if place == len(text):
                return Sign.TEXT if final else Sign.WAIT
        elif text[at] == "<":
            markup = self._markup(text, at, final)
            if markup is not Sign.TEXT:
                return markup
        self._advance(text, place)
        head = self._heads.in_answer(text, place, final, self._surroundings)
        return head if isinstance(head, Sign) else Exit(at, head.end, head)

    def _markup(self, text: str, at: int, final: bool) -> Skip | Sign:
        """What is neither text nor a call: an end of reasoning that comes late, closers behind a
        call."""
        if self._thinking_unclosed:
            if text.startswith(THINK_CLOSE, at):
                self._thinking_unclosed = False
                return Skip(at + len(THINK_CLOSE))
            if not final and begins(THINK_CLOSE, text, at):
                return Sign.WAIT
        if self._after_call and self.fresh:
            # Closers behind a call belong to it, however many there are.
            tag = tag_at(text, at, final)
            if tag is Sign.WAIT:
                return tag
            if isinstance(tag, Tag) and tag.kind in CLOSERS:
                return Skip(tag.end)
        return Sign.TEXT

    def _advance(self, text: str, stop: int) -> None:
        if stop > self._seen:
            self._surroundings.took(text[self._seen : stop])
            self._seen = stop
