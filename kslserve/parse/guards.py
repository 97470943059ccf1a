"""Surroundings: may text at this place be read as a call that strays from the format?

Prose that documents a call must not make one. So nothing is recovered out of a fenced block, out of
a code span that is still open, or out of a tool result that the model made up (`<result>` or a kin
that was not closed). What was written is taken line by line, so cuts do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RESULT = re.compile(
    r"<(?P<close>/?)(?P<name>results?|output|tool_(?:results?|response|output)|function_results?)"
    r"(?:\s[^<>\n]*)?>"
)
_FENCE = re.compile(r"\n {0,3}(?P<mark>`{3,}|~{3,})(?P<rest>[^\n]*)")
_SEED = re.compile(r"[`~<]")
_TICKS = re.compile(r"`+")
_BLANK = re.compile(r"\n[ \t]*\n")
_INDENT_MAX = 3


@dataclass(frozen=True, slots=True)
class _State:
    """fence: what opened the block around the next line. in_span: an odd number of back-ticks in
    this paragraph. results: names of made-up results that are open."""

    fence: str = ""
    in_span: bool = False
    results: tuple[str, ...] = ()

    def after(self, lines: str) -> _State:
        """The state behind whole lines, given without their last line break."""
        if not self.fence and not self.in_span and _SEED.search(lines) is None:
            return self
        text = f"\n{lines}\n"
        fence, in_span, results = self.fence, self.in_span, list(self.results)
        at = 0
        while True:
            if fence:
                close = _closing(text, at, fence)
                if close < 0:
                    break
                fence, at = "", close
            seed = _SEED.search(text, at)
            end = len(text) if seed is None else seed.start()
            if in_span and _BLANK.search(text, at, end) is not None:
                in_span = False
            if seed is None:
                break
            at = end + 1
            if seed[0] == "<":
                if (tag := _RESULT.match(text, end)) is not None:
                    at = tag.end()
                    _note(results, tag)
                continue
            line = text.rindex("\n", 0, end)
            opener = _FENCE.match(text, line) if text[line:end].isspace() else None
            if opener is not None and not (seed[0] == "`" and "`" in opener["rest"]):
                fence, in_span, at = opener["mark"], False, opener.end()
            elif seed[0] == "`":
                ticks = _TICKS.match(text, end)
                at = end + 1 if ticks is None else ticks.end()
                in_span = not in_span
        return _State(fence, in_span, tuple(results))


def _closing(text: str, at: int, fence: str) -> int:
    """The end of the line that closes a fenced block, -1 if there is none."""
    while (at := text.find(fence, at)) >= 0:
        line = text.rindex("\n", 0, at)
        found = _FENCE.match(text, line)
        end = text.index("\n", at)
        if found is not None and found["mark"].startswith(fence) and not found["rest"].strip():
            return end
        at = end
    return -1


def _note(results: list[str], tag: re.Match[str]) -> None:
    """Open or close a made-up result."""
    if not tag["close"]:
        results.append(tag["name"])
    elif tag["name"] in results:
        results.remove(tag["name"])


class Surroundings:
    """Of one generation's visible text."""

    __slots__ = ("_indent", "_line", "_state")

    def __init__(self) -> None:
        self._indent = 0  # spaces of the line so far, -1 once there is anything else
        self._state = _State()
        self._line: list[str] = []  # pieces of the line that is being written

    def took(self, piece: str) -> None:
        """The next piece of text."""
        if "\n" in piece:
            lines, _, piece = piece.rpartition("\n")
            self._state = self._state.after("".join(self._line) + lines)
            self._line.clear()
            self._indent = 0
        self._line.append(piece)
        if self._indent >= 0:
            self._indent = -1 if piece.strip(" ") else self._indent + len(piece)

    @property
    def starts_line(self) -> bool:
        """Whether what follows starts a line that is no block of code."""
        return 0 <= self._indent <= _INDENT_MAX

    def end_line(self) -> None:
        """A call stands here: what follows it is on a line of its own."""
        if line := "".join(self._line):
            self._state = self._state.after(line)
        self._line.clear()
        self._indent = 0

    def open(self) -> bool:
        """May what follows be a call?"""
        line = "".join(self._line)
        state = self._state.after(line) if line.strip() else self._state
        return not (state.fence or state.in_span or state.results)
