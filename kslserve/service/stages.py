"""Stages before and of the answer: reasoning with its budget, and the answer as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kslserve.service.callstages import Name, Text, called, in_call
from kslserve.service.stage import Owner, Stage, refused
from kslserve.service.toolgrammar import NAME_OPEN

if TYPE_CHECKING:
    from llguidance import LLMatcher

_PROBE_MAX = 256  # bytes behind a `<tool_call>` in reasoning that may still be the head of a call


def first_stage(owner: Owner) -> Stage:
    rules = owner.rules
    if rules.call is not None:
        return in_call(owner, rules.call)
    if rules.name_opened:
        return Name(owner, opened=True)
    if rules.reasoning:
        return _Reasoning(owner)
    return _answer(owner, lead=0)


def _answer(owner: Owner, *, lead: int, not_empty: bool = False) -> Stage:
    """The start of the answer. lead: line breaks that may come before it."""
    if owner.rules.answer is not None:
        return _Json(owner, owner.rules.answer, lead)
    return Text(owner, not_empty=not_empty)


class _Reasoning(Stage):
    """Up to `</think>`, a call, or the budget."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._count = 0
        self._closing = False
        self._probe: bytes | None = None  # what came behind a `<tool_call>`
        self._tools = owner.rules.tools
        if owner.rules.answer is not None:
            self.constant = owner.kit.no_end

    def take(self, token: int) -> Stage:
        owner, kit = self._owner, self._owner.kit
        self._count += 1
        if token == kit.think_close:
            if self._closing:
                return _Closed(owner)
            return _answer(owner, lead=2)
        if self._closing:
            return self
        if self._probe is not None:
            found = self._probed(kit.tokenizer.token_bytes(token))
            if found is not None:
                return found
        elif token == kit.call_open and owner.rules.tools:
            self._probe = b""
        budget = owner.rules.budget
        if budget is not None and self._count >= budget:
            self._closing = True
            owner.force(kit.closing(token))
        return self

    def _probed(self, piece: bytes) -> Stage | None:
        """The call that the text behind `<tool_call>` turned out to begin, if it did. In reasoning
        the tag alone is as likely a word, so a declared name must follow."""
        assert self._probe is not None
        self._probe += piece
        text = self._probe.lstrip()
        opener = NAME_OPEN.strip().encode()
        name, closed, rest = text.removeprefix(opener).partition(b">")
        if closed and text.startswith(opener) and name.decode("utf-8", "replace") in self._tools:
            return in_call(self._owner, name.decode(), rest.decode("utf-8", "replace"))
        begun = text.startswith(opener) or opener.startswith(text)
        if closed or not begun or len(self._probe) > _PROBE_MAX:
            self._probe = None
        return None


class _Closed(Stage):
    """Reasoning was closed by force, and the blank line behind it is to come."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._left = len(owner.kit.blank)

    def take(self, token: int) -> Stage:
        self._left -= 1
        return self if self._left else _answer(self._owner, lead=0, not_empty=True)


class _Json(Stage):
    """The answer as JSON; where tools are on offer, a call may stand in its place."""

    held = True

    def __init__(self, owner: Owner, matcher: LLMatcher, lead: int) -> None:
        self._owner = owner
        self.matcher = matcher
        self._lead = lead
        self._fresh = True

    def take(self, token: int) -> Stage:
        kit = self._owner.kit
        assert self.matcher is not None
        if self._fresh:
            breaks = kit.breaks.get(token, 0)
            if breaks and breaks <= self._lead:
                self._lead -= breaks
                return self
            if token == kit.call_open and self._owner.rules.tools:
                return called(self._owner)
            self._fresh = False
        if not self.matcher.consume_token(token):
            return refused(self._owner, self.matcher, token)
        return self

    def extra(self) -> Iterable[int]:
        if not self._fresh:
            return ()
        kit = self._owner.kit
        found = [token for token, breaks in kit.breaks.items() if breaks <= self._lead]
        return [*found, kit.call_open] if self._owner.rules.tools else found
