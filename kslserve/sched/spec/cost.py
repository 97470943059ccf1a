"""What waves cost: measured times of waves without prompts, by rows and columns, and of MTP drafts.

Times of single waves jump up, and all of them change when contexts grow or the machine gets busy.
So a figure follows shorter times at once and longer ones slowly; plain waves, which all others are
compared with, are measured again now and then, and soon where the others take other times than they
used to; and a figure that was not measured for long is not believed any more."""

from __future__ import annotations

DOWN, UP = 0.5, 0.25  # weights of a new measurement that is lower, and higher, than expected
CLIP = 1.5  # a measurement counts as at most so many times what was expected
PLAIN_FIRST = 3  # plain waves that are timed before anything is drafted beside so many rows
PLAIN_EVERY = 64  # waves after which a plain one is due
SURPRISE, SOON = 0.2, 4  # the same where times are off by this part on the average
SURE = 3  # measurements of which the least counts: the first ones of a shape are slow
HOPE = 0.07  # part by which a figure is taken lower for each measurement that it is short of SURE
STALE = 1024  # waves after which a figure is measured again before it is believed
GUESS = 0.15  # of the time of a plain wave: what each further column is thought to cost at first


class _Figure:
    __slots__ = ("count", "ms", "seen")

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.count = 1
        self.seen = 0

    def observe(self, ms: float) -> None:
        self.count += 1
        if self.count <= SURE:
            self.ms = min(self.ms, ms)
        else:
            rate = DOWN if ms < self.ms else UP
            self.ms += rate * (min(ms, CLIP * self.ms) - self.ms)


class RowCosts:
    """Times of waves of a fixed number of decode rows, by their columns. That of plain waves is
    kept in milliseconds, the others as multiples of it: what changes all of them leaves those
    alone."""

    __slots__ = ("_figures", "_known", "_plain_off", "_surprise", "_waves", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._figures: dict[int, _Figure] = {}
        self._known: list[int] = []  # columns that were measured, ascending
        self._waves = 0
        self._surprise = 0.0  # how far times are from what was expected, since the last plain wave
        self._plain_off = 0.0  # and how far that one was

    @property
    def plain_due(self) -> bool:
        """The next wave should be plain, to see how long that takes."""
        figure = self._figures.get(self.rows)
        if figure is None or figure.count < PLAIN_FIRST:
            return True
        since = self._waves - figure.seen
        off = max(abs(self._surprise), abs(self._plain_off))
        return since >= (SOON if off > SURPRISE else PLAIN_EVERY)

    def observe(self, columns: int, ms: float) -> None:
        self._waves += 1
        figure = self._figures.get(columns)
        if columns != self.rows:
            if self.rows not in self._figures:
                return
            ms /= self._figures[self.rows].ms
        if figure is None:
            figure = self._figures[columns] = _Figure(ms)
            self._known = sorted(self._figures)
        else:
            if figure.count >= SURE:
                off = min(ms / figure.ms, CLIP) - 1.0
                if columns == self.rows:
                    self._surprise, self._plain_off = 0.0, off
                else:
                    self._surprise += UP * (off - self._surprise)
            figure.observe(ms)
        figure.seen = self._waves

    def ms(self, columns: int) -> float:
        """Expected time of a wave; measured plain waves are a condition. Hopeful where little was
        measured, or it would never be."""
        plain = self._figures[self.rows].ms
        if columns == self.rows:
            return plain
        figure = self._figures.get(columns)
        if figure is None or self._waves - figure.seen >= STALE:
            return plain * self._between(columns)
        if figure.count >= SURE:
            return plain * figure.ms
        return plain * max(1.0, figure.ms * (1.0 - HOPE * (SURE - figure.count)))

    def _between(self, columns: int) -> float:
        """The multiple on the line between the nearest columns that were measured, or beyond the
        last of them as steep as from the plain wave to it; a hopeful one."""
        figures = self._figures
        low, high = self.rows, 0
        for known in self._known:
            if known < columns:
                low = max(low, known)
            elif known > columns:
                high = known
                break
        least = figures[low].ms if low > self.rows else 1.0
        if high:
            slope = max(0.0, (figures[high].ms - least) / (high - low))
        elif low > self.rows:
            slope = max(0.0, (least - 1.0) / (low - self.rows))
        else:
            slope = GUESS / self.rows
        return max(least, (least + slope * (columns - low)) * (1.0 - HOPE * SURE))


class WaveCosts:
    """Of every number of rows. draft_ms: of one step of MTP drafts, by how many rows take it."""

    __slots__ = ("_drafts", "_rows")

    def __init__(self) -> None:
        self._rows: dict[int, RowCosts] = {}
        self._drafts: dict[int, _Figure] = {}

    def of(self, rows: int) -> RowCosts:
        found = self._rows.get(rows)
        if found is None:
            found = self._rows[rows] = RowCosts(rows)
        return found

    def drafted(self, rows: int, steps: int, ms: float) -> None:
        """A round of MTP drafts of `steps` steps took `ms`."""
        ms /= steps
        figure = self._drafts.get(rows)
        if figure is None:
            self._drafts[rows] = _Figure(ms)
        else:
            figure.observe(ms)

    def draft_ms(self, rows: int, plain_ms: float) -> float:
        """Of one step; the nearest number of rows stands in for one that never drafted, and a part
        of a plain wave where nobody did."""
        if rows in self._drafts:
            return self._drafts[rows].ms
        if not self._drafts:
            return GUESS * plain_ms
        nearest = min(self._drafts, key=lambda known: abs(known - rows))
        return self._drafts[nearest].ms
