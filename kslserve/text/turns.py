"""Where things stand in a rendered prompt: its stable boundaries and the turns of its history.

Only text that the template wrote counts; what a client typed has a break inside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

SYSTEM_HEAD = "<|im_start|>system\n"
ASSISTANT_HEAD = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"


def boundaries(text: str, breaks: Sequence[int]) -> tuple[int, ...]:
    """Offsets, ascending, after the system turn and before the last assistant turn: up to there
    later requests are likely to be the same."""
    found: set[int] = set()
    if text.startswith(SYSTEM_HEAD):
        closing = TURN_END + "\n"
        for at in _written(text, closing, breaks):
            found.add(at + len(closing))
            break
    at = text.rfind(ASSISTANT_HEAD)
    while at > 0 and not _is_written(at, ASSISTANT_HEAD, breaks):
        at = text.rfind(ASSISTANT_HEAD, 0, at)
    if at > 0:
        found.add(at)
    return tuple(sorted(found))


def assistant_turns(
    text: str, breaks: Sequence[int], past: int
) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """((start, end) of each of the `past` finished assistant turns, start of the last one). A turn
    starts at its `<|im_start|>` and ends at its `<|im_end|>`. No turns and no last one if the text
    does not hold `past` + 1 of them, so that they cannot be told from one another."""
    starts = list(_written(text, ASSISTANT_HEAD, breaks))
    ends = list(_written(text, TURN_END, breaks))
    if len(starts) != past + 1 or (past and (not ends or starts[-2] > ends[-1])):
        return (), None
    finished = tuple((start, ends[bisect_right(ends, start)]) for start in starts[:-1])
    return finished, starts[-1]


def _written(text: str, wanted: str, breaks: Sequence[int]) -> Iterator[int]:
    """Offsets of `wanted` where the template wrote it."""
    at = text.find(wanted)
    while at >= 0:
        if _is_written(at, wanted, breaks):
            yield at
        at = text.find(wanted, at + 1)


def _is_written(at: int, wanted: str, breaks: Sequence[int]) -> bool:
    place = bisect_right(breaks, at)
    return place == len(breaks) or breaks[place] >= at + len(wanted)
