"""OutputParser: a model's output, in pieces -> ReasoningDelta, TextDelta and tool call events.

Pure and tolerant: any text gives some events, and however it is cut into pieces, the same ones but
for the cuts. Nothing that was sent is taken back. Text is held only while it may be markup.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kslserve.core.events import Event, TextDelta
from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.parse.answer import Answer
from kslserve.parse.guards import Surroundings
from kslserve.parse.heads import HeadFinder
from kslserve.parse.prose import Exit, Lead, Prose
from kslserve.parse.reasoning import Reasoning
from kslserve.parse.schema import shapes_of
from kslserve.parse.toolcall import CallParser

# The model itself ended its turn: what is missing of a call is supplied.
_ENDED = frozenset((FinishReason.STOP, FinishReason.TOOL_CALLS))


class _Tail(enum.Enum):
    """What is behind the text so far."""

    MORE = enum.auto()
    ENDED = enum.auto()  # nothing: the model ended its turn
    CUT = enum.auto()  # nothing, for another reason


_MORE = _Tail.MORE
_RAW_MAX = 1 << 16  # characters kept of a recovered call


@dataclass(slots=True)
class Recovery:
    """A call that strayed from the format. family: a value of `head.Family`. pieces: its text as
    written, if that is kept."""

    family: str
    pieces: list[str]
    size: int = 0

    def took(self, piece: str) -> None:
        piece = piece[: _RAW_MAX - self.size]
        self.size += len(piece)
        self.pieces.append(piece)


class OutputParser:
    """One per generation.

    tools: those on offer. thinking: the prompt left a think block open. tools_enabled: False makes
    everything outside of reasoning text. make_id: makes the id of a call, a new one each time.
    recover: False takes only calls that begin as they should. keep_text: `recovered` holds the text
    of calls that did not.

    in_reasoning: what comes next is reasoning, as far as can be told.
    """

    __slots__ = (
        "_call",
        "_calls",
        "_direct",
        "_heads",
        "_keep_text",
        "_make_id",
        "_recovery",
        "_section",
        "_strip_breaks",
        "_surroundings",
        "_text",
        "_thinking_unclosed",
        "in_reasoning",
        "recovered",
    )

    def __init__(
        self,
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        tools_enabled: bool = True,
        make_id: Callable[[], str],
        recover: bool = True,
        keep_text: bool = False,
    ):
        self._heads: HeadFinder | None = None
        if tools and tools_enabled:
            self._heads = HeadFinder(shapes_of(tools), recover=recover)
        self._surroundings = Surroundings()
        self.recovered: list[Recovery] = []
        self._recovery: Recovery | None = None  # of the call being read, if its text is kept
        self._keep_text = keep_text
        self._make_id = make_id
        self._text = ""  # unread
        self._calls = 0
        self._call: CallParser | None = None
        self._thinking_unclosed = False
        self._strip_breaks = False
        self._section: Prose | None = None  # None: what comes is text, without a look at it
        self.in_reasoning = thinking
        if thinking:
            self._section = Reasoning(self._heads)
        elif self._heads is not None:
            self._section = Answer(self._heads, self._surroundings, Lead.TEXT)
        # Makes the event of a piece that cannot be or become markup; None at the start of a
        # section.
        self._direct: Callable[[str], Event] | None = TextDelta if self._section is None else None

    @property
    def saw_tool_call(self) -> bool:
        """A call has begun."""
        return self._calls > 0

    @property
    def recoveries(self) -> list[str]:
        """The families of the calls that strayed from the format, in order."""
        return [recovery.family for recovery in self.recovered]

    def feed(self, text: str) -> list[Event]:
        """Events that the next piece of output completes."""
        if not text:
            return []
        if self._direct is not None and not self._text:
            if self._section is None:
                return [TextDelta(text)]
            if "<" not in text and "\n" not in text:
                return [self._direct(text)]
        elif self._call is not None and not self._text and "<" not in text and text[-1] != "\n":
            event = self._call.direct(text)
            if event is not None:
                if self._recovery is not None:
                    self._recovery.took(text)
                return [event]
        self._text += text
        out: list[Event] = []
        self._run(out, _MORE)
        return out

    def take_text(self, text: str) -> bool:
        """The common case of `feed`, without an event: True if the piece is visible text and
        nothing else; False, and it was not taken, where it takes more to tell."""
        if self._direct is None or self._text or self.in_reasoning:
            return False
        if self._section is None:
            return True
        if "<" in text or "\n" in text:
            return False
        self._surroundings.took(text)
        return True

    def finish(self, reason: FinishReason) -> list[Event]:
        """Events of what was held, at the end of output.

        If the model ended its turn, an unfinished call is completed. If the output was cut off, it
        stays as far as it got, without ToolCallEnd, unless its function was closed.
        """
        out: list[Event] = []
        self._run(out, _Tail.ENDED if reason in _ENDED else _Tail.CUT)
        return out

    def _run(self, out: list[Event], tail: _Tail) -> None:
        """Read all that can be read now."""
        final = tail is not _MORE
        if tail is _Tail.CUT and self._heads is not None:
            self._heads.cut_off()
        while True:
            if self._call is not None:
                ended, cut = tail is _Tail.ENDED, tail is _Tail.CUT
                used = self._call.step(self._text, ended, out, cut=cut)
                if self._recovery is not None:
                    self._recovery.took(self._text[:used])
                self._text = self._text[used:]
                if not self._call.closed:
                    return
                self._leave_call()
            elif self._section is None:
                self._pass(out)
                return
            else:
                used, end = self._section.step(self._text, final, out)
                if end is not None:
                    self._leave(end, self._text, out)
                self._text = self._text[used:]
                if end is None:
                    self._direct = self._direct_event()
                    return

    def _pass(self, out: list[Event]) -> None:
        """Everything is text, but for line breaks right after reasoning."""
        text, self._text = self._text, ""
        if self._strip_breaks:
            text = text.lstrip("\r\n")
        if text:
            self._strip_breaks = False
            self._direct = TextDelta
            out.append(TextDelta(text))

    def _leave(self, end: Exit, text: str, out: list[Event]) -> None:
        """A section is over: a call begins, or reasoning was closed."""
        self._direct = None
        self.in_reasoning = False
        if end.head is not None:
            assert self._heads is not None
            self._heads.found()
            if end.head.family is not None:
                self._recovery = Recovery(end.head.family.value, [])
                self.recovered.append(self._recovery)
                if self._keep_text:
                    self._recovery.took(text[end.start : end.end].lstrip("\n"))
                else:
                    self._recovery = None
            self._thinking_unclosed |= isinstance(self._section, Reasoning)
            self._call = CallParser(self._calls, self._make_id(), end.head, out)
            self._calls += 1
        elif self._heads is not None:
            self._section = Answer(self._heads, self._surroundings, Lead.FRAMING)
        else:
            self._section = None
            self._strip_breaks = True

    def _leave_call(self) -> None:
        assert self._heads is not None
        self._call = None
        self._recovery = None
        self._surroundings.end_line()
        self._section = Answer(
            self._heads,
            self._surroundings,
            Lead.GAP,
            thinking_unclosed=self._thinking_unclosed,
        )

    def _direct_event(self) -> Callable[[str], Event] | None:
        section = self._section
        return None if section is None or section.fresh else section.direct
