"""Batching policy: which sequences get how many columns of the next wave. Pure functions of values.

Every decoding sequence rides in every wave, since its row costs little beside the weights that the
wave reads anyway. Prompt columns fill the rest, so many that the wave takes about its target time:
at most that long does a decoding sequence, or a cancellation, wait for it. Where even a wave
without prompt columns takes longer than the target, prompts may double that time, so that a slow
machine does not read all its weights for a handful of columns; `decode_gap_ms` bounds the doubling.
While nobody decodes, waves may take all of `decode_gap_ms`: larger ones cost less per column, and
only a newcomer or a cancellation waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_MIN = 16  # prompt columns that are always worth a wave
CHUNK_START = 64  # before anything is measured
ALONE_START = 256  # the same while nobody decodes
AIM = 0.8  # part of the target time that a wave is planned for; the rest absorbs noise
LEVEL_MAX = 2.0  # most that one wave changes the estimate
FORGET = 0.9  # weight of the past in the moving averages


@dataclass(frozen=True, slots=True)
class Budget:
    """Columns of one wave: all of them, and those of prompt chunks."""

    columns: int
    prompt: int


def share(prompt_left: Sequence[int], last_served: Sequence[int], budget: Budget) -> list[int]:
    """Columns for each sequence, in the given order.

    prompt_left: prompt positions to compute, 0 for a decoding sequence. Sequences come in order of
    admission. last_served: wave in which each last had a row; where not all decoding sequences fit,
    those that waited longest go first. Prompts are computed one after the other, the oldest first,
    since side by side all would have their first token when the last one has it. Only those that
    are less than half as long as what is left of the oldest share its waves, up to half of each:
    so a short request passes a long prefill, and the long one still advances.
    """
    grants = [0] * len(prompt_left)
    decoding = [i for i, left in enumerate(prompt_left) if not left]
    if len(decoding) > budget.columns:
        decoding.sort(key=lambda i: last_served[i])
        del decoding[budget.columns :]
    for i in decoding:
        grants[i] = 1
    prompts = [i for i, left in enumerate(prompt_left) if left]
    room = min(budget.prompt, budget.columns - len(decoding))
    if not prompts or room <= 0:
        return grants
    oldest = prompts[0]
    others = sorted(prompts[1:], key=lambda i: prompt_left[i])
    passing = room // 2
    for i in others:
        if 2 * prompt_left[i] < prompt_left[oldest]:
            grants[i] = min(prompt_left[i], passing)
            passing -= grants[i]
            room -= grants[i]
    for i in (oldest, *others):
        more = min(prompt_left[i] - grants[i], room)
        grants[i] += more
        room -= more
    return grants


class WaveCost:
    """Moving estimate of wave time = base + columns * slope, in milliseconds, and the prompt
    columns that follow from it. Estimates are a least-squares line over waves with fading
    weights, times what the last wave with prompt columns took of what the line had said: a column
    behind many keys costs more, and the line learns that only when the prompt has gone further.

    chunk: prompt columns of the next wave that has any, beside decode rows; alone: without."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "alone", "chunk", "gap_ms", "most", "target_ms")

    def __init__(self, target_ms: float, gap_ms: float, most: int) -> None:
        self.target_ms = target_ms
        self.gap_ms = gap_ms
        self.most = most
        self.chunk = min(CHUNK_START, most)
        self.alone = min(ALONE_START, most)
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def line(self) -> tuple[float, float]:
        """(base, slope), both >= 0; all cost is in the slope until wave sizes differ."""
        if self._n == 0.0:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-9 * self._n * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
            base = (self._y - slope * self._x) / self._n
            if slope >= 0.0 and base >= 0.0:
                return base, slope
        return 0.0, self._y / self._x

    def observe(self, columns: int, prompt_columns: int, ms: float) -> None:
        """A wave of `columns` (of them `prompt_columns` of prompts) took `ms`."""
        base, slope = self.line()
        foreseen = base + slope * columns
        self._n = self._n * FORGET + 1.0
        self._x = self._x * FORGET + columns
        self._y = self._y * FORGET + ms
        self._xx = self._xx * FORGET + columns * columns
        self._xy = self._xy * FORGET + columns * ms
        if not prompt_columns:
            return
        level = min(max(ms / foreseen, 1 / LEVEL_MAX), LEVEL_MAX) if foreseen > 0.0 else 1.0
        longest = max(self.gap_ms, self.target_ms)
        beside = min(max(self.target_ms, 2.0 * self.line()[0]), longest)
        self.chunk = self._next(self.chunk, beside, prompt_columns, level)
        self.alone = self._next(self.alone, longest, prompt_columns, level)

    def _next(self, chunk: int, allowed_ms: float, prompt_columns: int, level: float) -> int:
        """The chunk that follows one, after a wave."""
        base, slope = self.line()
        # Changes are bounded: the line says little about waves of other sizes than those seen.
        least = min(chunk, prompt_columns) // 2
        most = 2 * max(chunk, CHUNK_MIN)
        chunk = max(least, min(self._fits(AIM * allowed_ms / level - base, slope), most))
        return max(min(CHUNK_MIN, self.most), min(chunk, self.most))

    def _fits(self, room_ms: float, slope: float) -> int:
        """Columns that take `room_ms`, at most `most`."""
        if room_ms <= 0.0:
            return 0
        return self.most if slope * self.most <= room_ms else int(room_ms / slope)
