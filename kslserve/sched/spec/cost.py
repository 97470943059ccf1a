"""What waves cost: times from the end of the wave before to the end of a wave without prompts, by
rows and columns, so with what the host needs for it; and times of MTP drafts.

Times of single waves jump up, by much, and all of them change when contexts grow or the machine
gets busy. So a figure follows the median of what is measured, a small step at a time, and larger
ones while all are on one side of it; figures of more columns are bounds for those of fewer; plain
waves, which all others are compared with, are measured again now and then, and soon where the
others take other times than they used to; and a figure that was not measured for long is not
believed any more."""

from __future__ import annotations

STEP = 0.1  # most that one measurement moves a figure, as a part of it
RUN = 3  # measurements on one side after which each further one moves it twice as far
STEP_MAX = 0.25
PLAIN_FIRST = 3  # plain waves that are timed before anything is drafted beside so many rows
PLAIN_EVERY = 64  # waves after which a plain one is due
SURPRISE, SOON = 0.12, 24  # the same where times are off by this part on the average
SEEN = 0.125  # weight of a new measurement in that average
OFF_MAX = 0.2  # most that one is off in it
SURE = 3  # measurements of which the least counts: the first ones of a shape are slow
HOPE = 0.2  # part by which what was not measured so often is taken lower than it seems
STALE = 256  # waves after which a figure is forgotten; that of plain waves never is
GUESS = 0.25  # of the time of a plain wave: what each further column is thought to cost at first
FRESH = 16  # waves for which a table of the figures serves, once they are sure
# Part of the time that looks for drafts may take where they find nothing; the waves between two of
# them that follow from it, at least and at most.
LOOKS = 1 / 400
PACE_MIN, PACE_MAX = 4, 64


class _Figure:
    """run: measurements in a row that were all higher, or all lower (then negative)."""

    __slots__ = ("count", "ms", "run", "seen")

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.count = 1
        self.run = 0
        self.seen = 0

    def observe(self, ms: float) -> None:
        self.count += 1
        if self.count <= SURE:
            self.ms = min(self.ms, ms)
            return
        up = ms > self.ms
        self.run = (max(self.run, 0) + 1) if up else (min(self.run, 0) - 1)
        step = min(STEP * (1 << min(max(abs(self.run) - RUN, 0), 8)), STEP_MAX)
        self.ms = min(max(ms, (1.0 - step) * self.ms), (1.0 + step) * self.ms)


class RowCosts:
    """Times of waves of a fixed number of decode rows, by their columns. That of plain waves is
    kept in milliseconds, the others as multiples of it: what changes all of them leaves those
    alone."""

    __slots__ = (
        "_figures", "_known", "_least", "_surprise", "_table", "_table_until", "_waves", "rows",
    )  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._figures: dict[int, _Figure] = {}
        self._known: list[int] = []  # columns that were measured, ascending
        self._waves = 0
        self._surprise = 0.0  # how far times are from what was expected, since the last plain wave
        self._table: list[float] = []
        self._table_until = 0
        self._least = 0.0

    @property
    def plain_due(self) -> bool:
        """The next wave should be plain, to see how long that takes."""
        figure = self._figures.get(self.rows)
        if figure is None or figure.count < PLAIN_FIRST:
            return True
        since = self._waves - figure.seen
        changed = abs(self._surprise) > SURPRISE or abs(figure.run) > RUN
        return since >= (SOON if changed else PLAIN_EVERY)

    def observe(self, columns: int, ms: float) -> None:
        self._waves += 1
        figure = self._figures.get(columns)
        if columns != self.rows:
            if self.rows not in self._figures:
                return
            ms /= self._figures[self.rows].ms
        if figure is None or (columns != self.rows and self._waves - figure.seen >= STALE):
            figure = self._figures[columns] = _Figure(ms)
            self._known = sorted(self._figures)
        else:
            if figure.count >= SURE:
                off = min(max(ms / figure.ms - 1.0, -OFF_MAX), OFF_MAX)
                if columns == self.rows:
                    self._surprise = 0.0
                else:
                    self._surprise += SEEN * (off - self._surprise)
            figure.observe(ms)
        figure.seen = self._waves
        if figure.count <= SURE:
            self._table_until = 0

    def glance(self, ms: float) -> None:
        """A plain wave took `ms` while nothing was drafted. Few of them are told of, so figures get
        old slowly by them; but they do, or one that was bad luck would end drafts for ever."""
        figure = self._figures.get(self.rows)
        if figure is not None:
            figure.observe(ms)
            self._waves += 1
            figure.seen = self._waves

    def ms(self, columns: int) -> float:
        """Expected time of a wave; measured plain waves are a condition. Hopeful where little was
        measured, or it would never be."""
        plain = self._figures[self.rows].ms
        return plain if columns == self.rows else plain * self._multiple(columns)

    def sure(self, columns: int) -> bool:
        """Waves of so many columns were measured often enough to say what they cost."""
        figure = self._figures.get(columns)
        return figure is not None and figure.count > SURE

    def table(self, most: int, gain: float) -> tuple[list[float], float]:
        """Expected times of waves by their columns, up to `most` drafts. And the tokens that each
        draft must promise to be worth anything: if all of some number of them promised as much, the
        wave would just gain `gain` over a plain one."""
        rows = self.rows
        if self._waves >= self._table_until or len(self._table) != rows + most + 1:
            self._table_until = self._waves + FRESH
            plain = self.ms(rows)
            times = [self.ms(rows + n) for n in range(1, most + 1)]
            # A wave of more columns does not take less.
            for n in range(most - 2, -1, -1):
                times[n] = min(times[n], times[n + 1])
            self._table = [plain] * (rows + 1) + [max(plain, ms) for ms in times]
            self._least = min(
                (rows * (gain * ms / plain - 1.0) / n for n, ms in enumerate(times, start=1)),
                default=2.0,
            )
        return self._table, self._least

    def _multiple(self, columns: int) -> float:
        figure = self._figures.get(columns)
        if figure is None or self._waves - figure.seen >= STALE:
            return self._between(columns)
        if figure.count >= SURE:
            return figure.ms
        return min(self._between(columns), figure.ms)

    def _between(self, columns: int) -> float:
        """The multiple on the line between the nearest columns whose figures are sure, or beyond
        the last of them as steep as from the plain wave to it; a hopeful one, or what was slow by
        chance would never be measured again."""
        figures = self._figures
        low, high = self.rows, 0
        for known in self._known:
            figure = figures[known]
            if figure.count < SURE or (known != self.rows and self._waves - figure.seen >= STALE):
                continue
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
        return max(least, (least + slope * (columns - low)) * (1.0 - HOPE))


class WaveCosts:
    """Of every number of rows. pace: plain waves that are to lie between two looks for drafts."""

    __slots__ = ("_drafts", "_look", "_rows", "pace")

    def __init__(self) -> None:
        self._rows: dict[int, RowCosts] = {}
        self._drafts: dict[int, _Figure] = {}  # of one step, by how many rows take it
        self._look: _Figure | None = None  # the part of a plain wave that a look takes
        self.pace = PACE_MIN

    def of(self, rows: int) -> RowCosts:
        found = self._rows.get(rows)
        if found is None:
            found = self._rows[rows] = RowCosts(rows)
        return found

    def looked(self, ms: float, plain_ms: float) -> None:
        """A look that found nothing took `ms`, beside plain waves of that time."""
        part = ms / plain_ms
        if self._look is None:
            self._look = _Figure(part)
        else:
            self._look.observe(part)
        self.pace = int(min(max(self._look.ms / LOOKS, PACE_MIN), PACE_MAX))

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
