"""Prices: what one more column costs a wave of a fixed number of rows, by how many more it has.

In plain waves: a price of 0.1 means that each of so many further columns takes a tenth of what the
wave takes without any. Kept for a few numbers of columns, between which it changes little, so that
few measurements say much. A price that was not measured for long is hoped to have fallen, and
learnt anew when it is: or what was bad luck would end drafts for ever. So is, sooner, one above
that of fewer columns, which have less to share: the machine was slow while it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of columns that have a price
SURE = 3  # measurements of which the median counts; before, the least of them
HOPE = 0.2  # part by which what was not measured so often is taken lower than it seems
STALE, HOPES = 256, 4  # waves after which a price is hoped to have fallen by it, and most times
DOUBTFUL = 48  # and after which it is hoped to be no higher than that of fewer columns
AGREE = 1.1  # factor up to which a wave took what was expected, and prices are alike
DOUBT = 0.5  # of what fewer measurements than are sure say against a price
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
        """A wave with n more columns seems to have taken so much longer than a plain one, in plain
        waves, which counts where nothing better is known. What such waves take longer, without any
        hope."""
        i, price = _nearest(n), excess / n
        first = self._first[i]
        if len(first) == SURE and self._stale(i):
            first[:] = [self._prices[i]]  # what was known has a vote
        if len(first) < SURE:
            first.append(price)
            self._prices[i] = max(median(first) if len(first) == SURE else min(first), 0.0)
        self._seen[i] = self.now
        return self.excess(n) if len(first) == SURE else excess

    def excess(self, n: int) -> float:
        """What waves with n more columns take longer than a plain one, without any hope."""
        return n * self._prices[_nearest(n)]

    def sure(self, n: int) -> bool:
        """So many columns, or nearly so, were measured often enough to say what they cost."""
        i = _nearest(n)
        return len(self._first[i]) == SURE and not self._stale(i)

    def _stale(self, i: int) -> bool:
        """What is known is to be learnt anew."""
        unseen = self.now - self._seen[i]
        return unseen >= STALE or (unseen >= DOUBTFUL and self._stands_out(i))

    def _stands_out(self, i: int) -> bool:
        return self._prices[i] > AGREE * self._of_fewer(i)

    def _of_fewer(self, i: int) -> float:
        """The price of the most columns, but fewer, that is sure; the same where there is none."""
        for fewer in range(i - 1, -1, -1):
            if len(self._first[fewer]) == SURE:
                return self._prices[fewer]
        return self._prices[i]

    def correct(self, waves: Iterable[tuple[int, float]]) -> bool:
        """Waves with so many further columns did take so many times what plain ones before and
        behind them took; whether that was expected of all."""
        measured: dict[int, list[float]] = {}
        for n, multiple in waves:
            measured.setdefault(_nearest(n), []).append((multiple - 1.0) / n)
        agreed = True
        for i, prices in measured.items():
            n, known = NUMBERS[i], self._prices[i]
            price = max(median(prices), 0.0)
            off = (1.0 + n * price) / (1.0 + n * known)
            agreed = agreed and 1.0 / AGREE <= off <= AGREE
            self._prices[i] += (1.0 if len(prices) >= SURE else DOUBT) * (price - known)
        return agreed

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
        known: list[tuple[int, float]] = []
        for i, n in enumerate(NUMBERS):
            if len(self._first[i]) == SURE:
                unseen, price = self.now - self._seen[i], self._prices[i]
                if unseen >= DOUBTFUL:
                    price = min(price, self._of_fewer(i))
                known.append((n, price * (1.0 - HOPE) ** min(unseen // STALE, HOPES)))
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


def _nearest(n: int) -> int:
    return _NEAREST[min(n, NUMBERS[-1])]
