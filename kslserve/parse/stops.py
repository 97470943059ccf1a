"""StopMatcher: stop strings in text that comes in pieces.

The match that is complete first wins, and of those that end at the same character the longest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class StopMatcher:
    """One per generation. stops: the strings; empty ones are ignored."""

    __slots__ = ("_begin", "_beginnings", "_held", "_reach", "_stops", "matched")

    def __init__(self, stops: Iterable[str]):
        # Of two stops that end at the same place the longer one is found first.
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._beginnings = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._reach = max(map(len, self._stops), default=1) - 1
        firsts = "".join(sorted({re.escape(stop[0]) for stop in self._stops}))
        self._begin = re.compile(f"[{firsts}]").search if self._stops else None
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that goes out, the stop string that was found or None). After a match nothing goes
        out."""
        if self.matched is not None:
            return "", self.matched
        if self._begin is None or (not self._held and self._begin(text) is None):
            return text, None
        text = self._held + text
        end = len(text) + 1
        for stop in self._stops:
            at = text.find(stop, 0, end)
            if at >= 0 and at + len(stop) < end:
                end = at + len(stop)
                self.matched = stop
        if self.matched is not None:
            self._held = ""
            return text[: end - len(self.matched)], self.matched
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The end of output: what was held and did not become a match."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._reach, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
