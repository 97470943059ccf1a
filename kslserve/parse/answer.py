"""Answer: visible text, outside of reasoning and calls."""

from __future__ import annotations

from kslserve.core.events import TextDelta
from kslserve.parse.heads import HeadFinder
from kslserve.parse.prose import Exit, Lead, Prose, Skip
from kslserve.parse.reasoning import THINK_CLOSE
from kslserve.parse.tags import CLOSERS, Sign, Tag, begins, tag_at


class Answer(Prose):
    """thinking_unclosed: a call ended the reasoning, so its `</think>` may still come, and is no
    text."""

    __slots__ = ("_after_call", "_heads", "_thinking_unclosed")

    def __init__(self, heads: HeadFinder, lead: Lead, *, thinking_unclosed: bool = False):
        super().__init__(TextDelta, lead, keep_tail=True)
        self._heads = heads
        self._after_call = lead is Lead.GAP
        self._thinking_unclosed = thinking_unclosed

    def special(self, text: str, at: int, final: bool) -> Skip | Exit | Sign:
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
        head = self._heads.at(text, at, final, in_reasoning=False)
        return head if isinstance(head, Sign) else Exit(head.end, head)
