"""TurnLog: what one generation sampled and what its client got, and whether both are the same
turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from kslserve.core.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from kslserve.core.request import ToolCall
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Ids
from kslserve.service.echo import Turn
from kslserve.text.tokenizer import Tokenizer

_ENDS = (FinishReason.STOP, FinishReason.TOOL_CALLS)
_LIMITS = (FinishReason.LENGTH, FinishReason.WINDOW)


class TurnLog:
    """head: int32, the prompt's ids from the turn's `<|im_start|>` on. ids; text: pieces of visible
    text. Whoever runs the generation appends to both."""

    __slots__ = ("_calls", "_head", "_reasoning", "_stop_ids", "_tokenizer", "ids", "text")

    def __init__(self, tokenizer: Tokenizer, head: Ids, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._head = head
        self._stop_ids = frozenset(stop_ids)
        self.ids: list[int] = []
        self.text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []  # with their fragments

    def took(self, events: Sequence[Event]) -> None:
        """Note what the client gets."""
        for event in events:
            if type(event) is TextDelta:
                self.text.append(event.text)
            elif type(event) is ReasoningDelta:
                self._reasoning.append(event.text)
            elif type(event) is ToolCallStart:
                self._calls.append((event, []))
            elif type(event) is ToolCallDelta:
                self._calls[event.index][1].append(event.json)

    def turn(self, reason: FinishReason) -> Turn | None:
        """The turn, if the client got all of it: neither cut by a stop string or a cancellation,
        nor broken off inside a character or a call."""
        ids = self.ids
        if ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        if not self._tokenizer.special_ids.isdisjoint(ids):
            return None
        text, reasoning = "".join(self.text), "".join(self._reasoning)
        if reason in _LIMITS:
            if not self._is_all(ids, reasoning + text):
                return None
        elif reason not in _ENDS:
            return None
        calls = self._whole_calls()
        if calls is None:
            return None
        whole = np.concatenate([self._head, np.array(ids, np.int32)])
        return Turn(whole, text.strip(), reasoning.strip(), calls)

    def _is_all(self, ids: Sequence[int], seen: str) -> bool:
        """Whether the ids spell what was seen, but for white space and the end of the reasoning."""
        end = self._tokenizer.id_of("</think>")
        spelled = b"".join(self._tokenizer.token_bytes(i) for i in ids if i != end)
        try:
            return "".join(spelled.decode().split()) == "".join(seen.split())
        except UnicodeDecodeError:
            return False

    def _whole_calls(self) -> tuple[ToolCall, ...] | None:
        calls = []
        for start, fragments in self._calls:
            try:
                arguments = orjson.loads("".join(fragments) or "{}")
            except orjson.JSONDecodeError:
                return None
            if not isinstance(arguments, dict):
                return None
            calls.append(ToolCall(start.call_id, start.name, arguments))
        return tuple(calls)
