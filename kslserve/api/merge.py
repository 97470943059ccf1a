"""Joins neighbouring deltas, so that a wave, or all waves of a paused reader, cost one frame
each."""

from __future__ import annotations

from collections.abc import Iterable

from kslserve.core.events import Event, LogprobsDelta, ReasoningDelta, TextDelta, ToolCallDelta


def merge(events: Iterable[Event]) -> list[Event]:
    """Equal output, fewer events: neighbours of one kind (and one call) become one.

    Log-probabilities belong to the text around them: they move in front of a run of text that they
    interrupt.
    """
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, LogprobsDelta):
            _merge_logprobs(merged, event)
        elif isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolCallDelta)
            and isinstance(last, ToolCallDelta)
            and event.index == last.index
        ):
            merged[-1] = ToolCallDelta(event.index, last.json + event.json)
        else:
            merged.append(event)
    return merged


def _merge_logprobs(merged: list[Event], event: LogprobsDelta) -> None:
    at = len(merged)
    if at and isinstance(merged[at - 1], TextDelta):
        at -= 1
    before = merged[at - 1] if at else None
    if isinstance(before, LogprobsDelta):
        merged[at - 1] = LogprobsDelta(before.entries + event.entries)
    else:
        merged.insert(at, event)
