"""EchoTable: the exact ids of turns that were generated here, found again when a client sends them
back.

What the model wrote and what the template makes of its echo differ: white space, the spelling of
arguments, reasoning that the client dropped. A turn that comes back equal by value gets its own ids
in the next prompt, so that the prompt goes on from the state that was computed. It is a cache:
what it has lost, or what the client changed, is rendered by the template.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kslserve.core.request import Message, Role, ToolCall
from kslserve.engine.types import Ids
from kslserve.text.assistant_turn import split_inline_reasoning

TABLE_BYTES = 64 << 20
_ENTRY_BYTES = 1024  # of an entry beside its ids and texts

_Key = tuple[str, ...] | tuple[str | bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A generated turn as its client got it. ids: int32, from its `<|im_start|>` to the last one
    before its end token. calls: in order, arguments as values."""

    ids: Ids
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class EchoTable:
    """max_bytes bounds what is kept; the least recently used turns go first. on_record: may be set
    to hear of each turn and its context, where it was recorded. Safe to use from several
    threads."""

    def __init__(self, max_bytes: int = TABLE_BYTES) -> None:
        self.on_record: Callable[[Turn, bytes], None] | None = None
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._numbers = 0
        self._turns: OrderedDict[int, tuple[Turn, list[_Key]]] = OrderedDict()  # by number
        self._places: dict[_Key, int] = {}  # what a turn is found by -> its number

    @property
    def size_bytes(self) -> int:
        """Size of what is kept."""
        return self._bytes

    def record(self, turn: Turn, context: bytes) -> None:
        """Keep a turn. context: of the conversation that it answered (`contexts`)."""
        size = _size(turn)
        if size > self._max_bytes:
            return
        if self.on_record is not None:
            self.on_record(turn, context)
        with self._lock:
            self._numbers += 1
            keys = _keys(turn, context)
            same = self._places.get(keys[0])
            if same is not None and self._turns[same][1] == keys:
                self._drop(same)  # an answer said again: nobody would find the old one
            self._turns[self._numbers] = turn, keys
            self._places.update(dict.fromkeys(keys, self._numbers))
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._turns)))

    def _drop(self, number: int) -> None:
        old, keys = self._turns.pop(number)
        self._bytes -= _size(old)
        for key in keys:
            if self._places[key] == number:
                del self._places[key]

    def find(self, message: Message, context: bytes) -> Ids | None:
        """Ids of the turn that an assistant message repeats, None if there is none. Texts are
        compared without white space around them, arguments as JSON values; reasoning only if the
        message has some. A plain text without its reasoning is too little to know a turn by, so it
        is looked for in the same conversation."""
        text, reasoning = message.text.strip(), (message.reasoning or "").strip()
        found = self._find(text, reasoning, message.tool_calls, context)
        if found is None and not reasoning and (parts := split_inline_reasoning(text)):
            reasoning, text = parts
            found = self._find(text.strip(), reasoning.strip(), message.tool_calls, context)
        return found

    def _find(
        self, text: str, reasoning: str, calls: Sequence[ToolCall], context: bytes
    ) -> Ids | None:
        keys: list[_Key]
        if calls:
            keys = [("call", calls[0].call_id)]
        elif reasoning:
            keys = [_said(text, reasoning)]
        else:
            keys = [("here", context, _digest(text)), _said(text, "")]
        with self._lock:
            for key in keys:
                number = self._places.get(key)
                if number is None:
                    continue
                turn, _ = self._turns[number]
                if (
                    turn.text == text
                    and reasoning in ("", turn.reasoning)
                    and _same_calls(turn.calls, calls)
                ):
                    self._turns.move_to_end(number)
                    return turn.ids
        return None


def contexts(messages: Sequence[Message]) -> Iterator[bytes]:
    """What came before each message, and last before the answer: a digest of the system text and of
    all that user and model said, without what clients leave out or move (reasoning, reminders of
    the system, tool results)."""
    running = hashlib.blake2b(digest_size=16)
    lead = True
    for message in messages:
        yield running.digest()
        lead = lead and message.role is Role.SYSTEM
        if message.role is Role.TOOL or (message.role is Role.SYSTEM and not lead):
            continue
        text = message.text.strip()
        if message.role is Role.ASSISTANT:
            if message.reasoning is None and (parts := split_inline_reasoning(text)):
                text = parts[1].strip()
            if not text and not message.tool_calls:
                continue
        data = text.encode("utf-8", "surrogatepass")
        running.update(f"{message.role.value} {len(data)} ".encode())
        running.update(data)
        for call in message.tool_calls:
            running.update(repr(call.call_id).encode("utf-8", "surrogatepass"))
    yield running.digest()


def _keys(turn: Turn, context: bytes) -> list[_Key]:
    if turn.calls:
        return [("call", turn.calls[0].call_id)]
    return [("here", context, _digest(turn.text)), _said(turn.text, turn.reasoning)]


def _said(text: str, reasoning: str) -> _Key:
    return ("said", _digest(text), _digest(reasoning))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _same_calls(ours: Sequence[ToolCall], theirs: Sequence[ToolCall]) -> bool:
    return len(ours) == len(theirs) and all(
        a.call_id == b.call_id and a.name == b.name and _same(a.arguments, b.arguments)
        for a, b in zip(ours, theirs, strict=True)
    )


def _same(ours: Any, theirs: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are the same, 1 and true are not."""
    if isinstance(ours, dict):
        return (
            isinstance(theirs, dict)
            and ours.keys() == theirs.keys()
            and all(_same(value, theirs[key]) for key, value in ours.items())
        )
    if isinstance(ours, list):
        return (
            isinstance(theirs, list) and len(ours) == len(theirs) and all(map(_same, ours, theirs))
        )
    return isinstance(ours, bool) == isinstance(theirs, bool) and bool(ours == theirs)


def _size(turn: Turn) -> int:
    texts = len(turn.text) + len(turn.reasoning)
    # Arguments are about as large as the ids that spell them.
    return _ENTRY_BYTES + 3 * turn.ids.nbytes + texts
