"""Allowance: what all drafts together may lose, whatever was expected of them.

A small part of the time that passes, saved up for a while, and what drafts gained, of which more
can be saved up: a text in which they gain holds some long drafts that fail, one after the other. So
a server is slower than one that drafts nothing by that part, and by what was saved up, at most.
Where it is used up nothing is drafted, nor looked for, until there is some again; then one round
that gains gives as much as many waves of waiting."""

from __future__ import annotations

PART = 1 / 400  # of the time of plain waves
MOST = 6.0  # plain waves that can be saved up by waiting
EARNED = 16.0  # and by what drafts gained: some long ones that fail, on a CPU
FIRST = 4.0  # at first
OWED = 12.0  # most that one correction takes
DEBT = 4.0  # and where it ends: what seemed lost keeps no drafts away for thousands of waves


class Allowance:
    """What is left beside each number of rows, in plain waves."""

    __slots__ = ("_left", "_saved", "_wave")

    def __init__(self) -> None:
        self._left: dict[int, float] = {}
        self._saved: dict[int, float] = {}  # since it was last corrected, whatever can be kept
        self._wave = 0

    def waves(self, rows: int, wave: int) -> int:
        """How many waves nothing is to be drafted beside so many rows. wave: the next one."""
        before = self._left.get(rows, FIRST)
        left = min(before + PART * (wave - self._wave), max(before, MOST))
        self._wave = wave
        self._left[rows] = left
        return 0 if left > 0.0 else 1 + int(-left / PART)

    def settle(self, rows: int, saved: float) -> None:
        """Drafts saved so many plain waves; negative where they cost."""
        self._left[rows] = min(self._left.get(rows, FIRST) + saved, EARNED)
        self._saved[rows] = self._saved.get(rows, 0.0) + saved

    def correct(self, rows: int, owed: float) -> None:
        """Of what was settled since the last time, so much was not saved after all: as it seems,
        since much of it is rather a pace that changed and came back."""
        saved = self._saved.pop(rows, 0.0)
        if owed > 0.0:
            # More may have been saved than could be kept: that pays first.
            owed = min(max(owed - max(saved, 0.0), 0.0), OWED)
        left = self._left.get(rows, FIRST)
        self._left[rows] = max(min(left - owed, EARNED), min(left, -DEBT))
