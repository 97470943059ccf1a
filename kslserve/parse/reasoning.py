"""Reasoning: from the start of output, if the prompt left a think block open, to `</think>` or a
call."""

from __future__ import annotations

from kslserve.core.events import ReasoningDelta
from kslserve.parse.heads import HeadFinder
from kslserve.parse.prose import Exit, Lead, Prose, Skip
from kslserve.parse.tags import Sign, begins

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class Reasoning(Prose):
    """heads: None if calls are off. An opener that repeats the prompt's is dropped. Output that
    ends here is reasoning and nothing else."""

    __slots__ = ("_heads",)

    def __init__(self, heads: HeadFinder | None):
        super().__init__(ReasoningDelta, Lead.FRAMING, keep_tail=False)
        self._heads = heads

    def special(self, text: str, at: int, final: bool) -> Skip | Exit | Sign:
        if text.startswith(THINK_CLOSE, at):
            return Exit(at, at + len(THINK_CLOSE))
        if self.fresh and text.startswith(THINK_OPEN, at):
            return Skip(at + len(THINK_OPEN))
        if not final and (
            begins(THINK_CLOSE, text, at) or (self.fresh and begins(THINK_OPEN, text, at))
        ):
            return Sign.WAIT
        if self._heads is None:
            return Sign.TEXT
        head = self._heads.in_reasoning(text, at, final)
        return head if isinstance(head, Sign) else Exit(at, head.end, head)
