"""What waves cost: measured times of waves without prompts, by rows and columns, and of MTP drafts.

Times of single waves jump, and they drift as contexts grow or the machine gets busy. So each figure
follows its measurements slowly and never by more than a factor, and one that was not measured for
long is not believed any more."""

from __future__ import annotations

RATE = 0.25  # weight of a new measurement
CLIP = 1.5  # a measurement counts as at most so many times what was expected
SURE = 3  # measurements of which the least counts: the first ones of a shape are slow
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
            self.ms *= 1.0 + RATE * (min(max(ms / self.ms, 1.0 / CLIP), CLIP) - 1.0)


class RowCosts:
    """Times of waves of a fixed number of decode rows, by their columns."""

    __slots__ = ("_figures", "_known", "_waves", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._figures: dict[int, _Figure] = {}
        self._known: list[int] = []  # columns that were measured, ascending
        self._waves = 0

    @property
    def plain_waves(self) -> int:
        """Plain waves that were measured."""
        figure = self._figures.get(self.rows)
        return figure.count if figure is not None else 0

    @property
    def since_plain(self) -> int:
        """Waves since the last plain one, which there was."""
        return self._waves - self._figures[self.rows].seen

    def observe(self, columns: int, ms: float) -> None:
        self._waves += 1
        figure = self._figures.get(columns)
        if figure is None:
            figure = self._figures[columns] = _Figure(ms)
            self._known = sorted(self._figures)
        else:
            figure.observe(ms)
        figure.seen = self._waves

    def ms(self, columns: int) -> float:
        """Expected time of a wave; measured plain waves are a condition."""
        figure = self._figures.get(columns)
        if figure is not None and self._waves - figure.seen < STALE:
            return figure.ms
        return self._between(columns)

    def _between(self, columns: int) -> float:
        """On the line between the nearest columns that were measured, or beyond the last of them
        as steep as from the plain wave to it."""
        figures = self._figures
        plain = figures[self.rows].ms
        low, high = self.rows, 0
        for known in self._known:
            if known < columns:
                low = max(low, known)
            elif known > columns:
                high = known
                break
        if high:
            part = (columns - low) / (high - low)
            return figures[low].ms + part * (figures[high].ms - figures[low].ms)
        slope = GUESS * plain / self.rows
        if low > self.rows:
            slope = max(0.0, (figures[low].ms - plain) / (low - self.rows))
        return figures[low].ms + slope * (columns - low)


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
