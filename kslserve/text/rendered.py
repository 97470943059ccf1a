"""Rendered: a prompt as text, with the places where typed text must not turn into control
tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendered:
    """text: the whole prompt. thinking_open: the prompt ends inside a think block, so output starts
    with reasoning. boundaries: offsets in `text`, ascending, up to which later requests are likely
    to agree: the end of the system turn (tools included) and the start of the turn to be generated.
    breaks: offsets, ascending, that no control token may span; each lies inside something that a
    client typed and that reads like one. assistant_turns: (start, end) of each finished assistant
    turn of the history, in order, from its `<|im_start|>` up to its `<|im_end|>`; empty if the
    template writes turns in another way. new_turn: offset of the `<|im_start|>` of the turn to be
    generated; None if an old turn is to be continued."""

    text: str
    thinking_open: bool
    boundaries: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    assistant_turns: tuple[tuple[int, int], ...] = ()
    new_turn: int | None = None
