"""CallParser: the text of one tool call, after its head -> ToolCallStart, ToolCallDelta*,
ToolCallEnd.

String values stream as they come; others are sent when complete, converted by the declared type.
Where a value ends is the question of `closers`.
"""

from __future__ import annotations

import enum

from kslserve.core.events import Event, ToolCallDelta, ToolCallEnd, ToolCallStart
from kslserve.parse.arguments import NULLS, convert, escape, load_object, quote, strict_json
from kslserve.parse.closers import Closers
from kslserve.parse.drift import ends_loosely
from kslserve.parse.head import Head, JsonScan
from kslserve.parse.jsonish import Broken, read_object
from kslserve.parse.schema import STRING
from kslserve.parse.tags import CLOSERS, Kind, Sign, Tag, next_tag, skip_gap

# Names of a parameter, itself undeclared, in which a model may put all arguments as one object.
_WHOLE = frozenset(("arguments", "args", "parameters", "params", "input", "kwargs"))


class _Mode(enum.Enum):
    """What becomes of the text of the value being read."""

    STREAM = enum.auto()  # a string: sent as it comes
    NULLABLE = enum.auto()  # a string, unless it turns out to be null
    HOLD = enum.auto()  # another type: converted when complete
    WHOLE = enum.auto()  # perhaps all arguments in one
    DROP = enum.auto()  # without a name, or given before


class CallParser:
    """One call. `step` is fed the unread text again and again; what it consumed must not come
    back."""

    __slots__ = (
        "_closers",
        "_fragments",
        "_given",
        "_head",
        "_held",
        "_in_value",
        "_index",
        "_mode",
        "_name",
        "_opened",
        "_scan",
        "_starting",
        "_stray",
        "closed",
    )

    def __init__(self, index: int, call_id: str, head: Head, out: list[Event]):
        self._index = index
        self._head = head
        self._given: set[str] = set()
        self._closers = Closers(head.shape, head.alias, self._given, loose=head.family is not None)
        self._fragments: list[str] = []
        self._scan: JsonScan | None = None
        self._in_value = False
        self._mode = _Mode.DROP
        self._name = ""
        self._held: list[str] = []  # text of the value that is not sent yet
        self._opened = False  # the value's opening quote is sent
        self._starting = False  # at the value's first character
        self._stray = False  # in text between tags, which has no place in a call
        self.closed = False
        out.append(ToolCallStart(index, call_id, head.shape.name))
        if head.arguments is not None:
            self._give_all(head.arguments)
            self._close(out)

    def step(self, text: str, final: bool, out: list[Event], *, cut: bool = False) -> int:
        """Read on; returns the number of characters consumed. Sets `closed` when the call is over.

        final: the model has ended its turn, so what is missing is supplied. cut: the output was cut
        off here; a call whose function is closed is complete, any other one stays as far as it got.
        """
        at = 0
        while not self.closed:
            if self._in_value:
                next_at = self._value(text, at, final, cut)
            else:
                next_at = self._between(text, at, final, out)
            if next_at < 0:
                at = -next_at - 1
                break
            at = next_at
        self._flush(out)
        return at

    def direct(self, piece: str) -> Event | None:
        """The event of a piece without "<" and without a line break at its end, if it is inside a
        string that is being sent; None otherwise. Nothing may be unread before it."""
        if not (self._in_value and self._opened and self._mode is _Mode.STREAM):
            return None
        self._closers.took(piece)
        return ToolCallDelta(self._index, escape(piece))

    # Both readers return the index read up to, or -(index + 1) to wait for more text there.

    def _between(self, text: str, at: int, final: bool, out: list[Event]) -> int:
        """Outside of values: the next tag decides."""
        if self._scan is not None:
            return self._json(text, at, final)
        if self._stray:
            following = text.find("<", at)
            if following < 0 and not final:
                return -len(text) - 1
            self._stray = False
            at = following if following >= 0 else len(text)
        tag = next_tag(text, at, final, self._head.alias)
        if tag is Sign.WAIT:
            return -at - 1
        if tag is Sign.END:
            self._close(out)
            return len(text)
        if not isinstance(tag, Tag):
            start = skip_gap(text, at)
            if start >= 0 and text[start] == "{" and not self._given:
                self._scan = JsonScan()
                return start
            if self._head.family is not None and start >= 0 and text[start] == "<":
                ends = ends_loosely(text, start, final)
                if ends is Sign.WAIT:
                    return -at - 1
                if ends:
                    self._close(out)
                    return start
            self._stray = True
            return max(at, start) + 1
        if tag.kind is Kind.PARAM_OPEN:
            self._begin_value(tag.name)
            return tag.end
        if tag.kind is Kind.PARAM_CLOSE:
            return tag.end
        self._close(out)
        return tag.end if tag.kind in CLOSERS else tag.start

    def _json(self, text: str, at: int, final: bool) -> int:
        """All arguments as one JSON object, in place of parameters."""
        assert self._scan is not None
        end = self._scan.end(text, at)
        if end < 0 and not final:
            return -at - 1
        self._scan = None
        if end >= 0:
            arguments = load_object(text[at:end])
        else:
            end = len(text)
            try:
                arguments, end = read_object(text, at, (), ended=True)
            except Broken:
                arguments = None
        self._give_all(arguments or {})
        return end

    def _value(self, text: str, at: int, final: bool, cut: bool) -> int:
        """Inside a value: everything up to the closer that counts."""
        if self._starting:
            if at == len(text) and not final:
                return -at - 1
            self._starting = False
            if text.startswith("\n", at):
                at += 1
        seek = at
        while True:
            stop = text.find("<", seek)
            if stop < 0:
                stop = len(text)
                break
            end = self._closers.at(text, stop, at, final, cut)
            if end is Sign.WAIT:
                break
            if isinstance(end, int):
                self._push(text[at:stop].removesuffix("\n"))
                self._end_value()
                return end
            seek = stop + 1
        if final:
            self._push(text[at:].removesuffix("\n"))
            self._end_value()
            return len(text)
        # The last line break may be framing.
        if stop > at and text[stop - 1] == "\n":
            stop -= 1
        self._push(text[at:stop])
        return -stop - 1

    def _begin_value(self, name: str) -> None:
        self._name = name
        self._in_value = self._starting = True
        self._held = []
        self._opened = False
        self._closers.begin(name)
        shape = self._head.shape
        types = shape.types(name)
        if not name or name in self._given:
            self._mode = _Mode.DROP
        elif name not in shape.known and name in _WHOLE and shape.known and not self._given:
            self._mode = _Mode.WHOLE
        elif types == STRING:
            self._mode = _Mode.STREAM
        elif types == {"string", "null"}:
            self._mode = _Mode.NULLABLE
        else:
            self._mode = _Mode.HOLD

    def _push(self, piece: str) -> None:
        """Take a piece of the value's text."""
        if not piece:
            return
        self._closers.took(piece)
        if self._mode is _Mode.DROP:
            return
        if self._mode is not _Mode.STREAM:
            self._held.append(piece)
            if self._mode is not _Mode.NULLABLE:
                return
            piece = "".join(self._held)
            if any(null.startswith(piece) for null in NULLS):
                return
            self._mode = _Mode.STREAM
        if not self._opened:
            self._opened = True
            self._give(self._name, '"')
        self._fragments.append(escape(piece))

    def _end_value(self) -> None:
        self._in_value = False
        mode, name, held = self._mode, self._name, "".join(self._held)
        if mode is _Mode.STREAM:
            if self._opened:
                self._fragments.append('"')
            else:
                self._give(name, '""')
        elif mode is _Mode.WHOLE:
            arguments = load_object(held)
            if arguments is not None and arguments.keys() <= self._head.shape.known:
                self._give_all(arguments)
            else:
                self._give(name, quote(held))
        elif mode is not _Mode.DROP:
            self._give(name, convert(held, self._head.shape.types(name)))
        self._held = []

    def _give(self, name: str, json: str) -> None:
        """Append a member to the arguments."""
        opener = ", " if self._given else "{"
        self._given.add(name)
        self._fragments.append(f"{opener}{quote(name)}: {json}")

    def _give_all(self, arguments: dict[str, object]) -> None:
        for name, value in arguments.items():
            json = strict_json(value)
            if json is not None and name not in self._given:
                self._give(name, json)

    def _close(self, out: list[Event]) -> None:
        self._fragments.append("}" if self._given else "{}")
        self._flush(out)
        out.append(ToolCallEnd(self._index))
        self.closed = True

    def _flush(self, out: list[Event]) -> None:
        if self._fragments:
            out.append(ToolCallDelta(self._index, "".join(self._fragments)))
            self._fragments.clear()
