"""Prices: what one more column costs a wave of a fixed number of rows, by how many more it has.

In plain waves: a price of 0.1 means that each of so many further columns takes a tenth of what the
wave takes without any. Kept for a few numbers of columns, between which it changes little, so that
few measurements say much. A price follows the median of what is measured. One that was not
measured for long is hoped to have fallen, and learnt anew when it is: or what was bad luck would
end drafts for ever."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of columns that have a price
STEP = 0.1  # most that one measurement moves a price, in the unit of a whole wave
SURE = 3  # measurements of which the median counts; before, the least of them
HOPE = 0.2  # part by which what was not measured so often is taken lower than it seems
STALE, HOPES = 256, 4  # waves after which a price is hoped to have fallen by it, and most times
GUESS = 0.25  # of the time of a plain wave: what a column of each row is thought to cost at first
# By numbers of columns, which price is nearest.
_NEAREST = [
    min((abs(number - n) / number, i) for i, number in enumerate(NUMBERS))[1]
    for n in range(NUMBERS[-1] + 1)
]


class Prices:
    """rows: of the waves. now: id of the newest wave, kept by whoever keeps these."""

    __slots__ = ("_first", "_prices", "_seen", "now", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.now = 0
        self._prices = [0.0] * len(NUMBERS)
        self._first: list[list[float]] = [[] for _ in NUMBERS]  # measurements, up to SURE
        self._seen = [0] * len(NUMBERS)  # the last one

    def observe(self, n: int, excess: float) -> float:
        """A wave with n more columns took so much longer than a plain one, in plain waves; what
        such waves take longer, without any hope, or this one where that is not known."""
        i = _NEAREST[min(n, NUMBERS[-1])]
        price = excess / n
        first = self._first[i]
        if self.now - self._seen[i] >= STALE:
            first.clear()
        if len(first) < SURE:
            first.append(price)
            price = median(first) if len(first) == SURE else min(first)
        else:
            most = STEP * (1.0 + n * self._prices[i]) / n
            price = min(max(price, self._prices[i] - most), self._prices[i] + most)
        self._prices[i] = max(price, 0.0)
        self._seen[i] = self.now
        return n * self._prices[i] if len(first) == SURE else excess

    def sure(self, n: int) -> bool:
        """So many columns, or nearly so, were measured often enough to say what they cost."""
        i = _NEAREST[min(n, NUMBERS[-1])]
        return len(self._first[i]) == SURE and self.now - self._seen[i] < STALE

    def scale(self, factor: float) -> None:
        """Waves with further columns take so many times what they seemed to."""
        for i, n in enumerate(NUMBERS):
            if self._first[i]:
                self._prices[i] = max((1.0 + n * self._prices[i]) * factor - 1.0, 0.0) / n

    def multiples(self) -> list[float]:
        """Of a plain wave, what waves take by their further columns, up to the last of NUMBERS: no
        less with more of them."""
        found = [1.0]
        for (low, at_low), (high, at_high) in pairwise(self._hopeful()):
            for n in range(max(low, 1), high):
                found.append(1.0 + n * (at_low + (at_high - at_low) * (n - low) / (high - low)))
        for n in range(len(found) - 2, -1, -1):
            found[n] = min(found[n], found[n + 1])
        return found

    def _hopeful(self) -> list[tuple[int, float]]:
        """Prices by numbers of columns, with ends; lower where little was measured, or long ago."""
        known = [
            (n, self._prices[i] * (1.0 - HOPE) ** min((self.now - self._seen[i]) // STALE, HOPES))
            for i, n in enumerate(NUMBERS)
            if len(self._first[i]) == SURE
        ]
        if known:
            first, last = known[0][1], known[-1][1]
        else:
            first = last = GUESS / self.rows
        known = [(0, first), *known, (NUMBERS[-1] + 1, last)]
        prices = dict(known)
        for (low, at_low), (high, at_high) in pairwise(known):
            for i, n in enumerate(NUMBERS):
                if low < n < high:
                    price = (1.0 - HOPE) * (at_low + (at_high - at_low) * (n - low) / (high - low))
                    prices[n] = min(price, self._prices[i]) if self._first[i] else price
        return sorted(prices.items())
