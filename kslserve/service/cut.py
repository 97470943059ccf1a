"""Where an answer ends before the model ends it: at a stop string in its visible text, or behind
the only tool call that is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from kslserve.core.events import Event, LogprobsDelta, TextDelta, ToolCallEnd
from kslserve.parse.stops import StopMatcher


class Cut:
    """stops: the client's stop strings. one_call: the first complete call is the last event.

    Stop strings apply to visible text only. Text that may begin one is held until that is known."""

    __slots__ = ("_one_call", "_stops", "idle")

    def __init__(self, stops: Sequence[str], one_call: bool) -> None:
        self._stops = StopMatcher(tuple(stops)) if stops else None
        self._one_call = one_call
        self.idle = self._stops is None and not one_call  # it never cuts

    def feed(self, events: list[Event]) -> tuple[list[Event], str | None]:
        """Events up to the first stop string, or up to the end of the only call allowed. The second
        value is None where the generation goes on, and empty for a call."""
        kept: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta) and self._stops is not None:
                text, matched = self._stops.feed(event.text)
                if text:
                    kept.append(TextDelta(text))
                if matched is not None:
                    return kept, matched
                continue
            if not isinstance(event, LogprobsDelta):
                # Held text that might have begun a stop string comes before what follows it.
                kept += self._held()
            kept.append(event)
            if self._one_call and isinstance(event, ToolCallEnd):
                return kept, ""
        return kept, None

    def finish(self, events: list[Event]) -> tuple[list[Event], str | None]:
        """The same for the last events; what is still held comes behind them."""
        if self._stops is None:
            return events, None
        kept, matched = self.feed(events)
        return (kept, matched) if matched is not None else (kept + self._held(), None)

    def _held(self) -> list[Event]:
        text = self._stops.flush() if self._stops is not None else ""
        return [TextDelta(text)] if text else []
