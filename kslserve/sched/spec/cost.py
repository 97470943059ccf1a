"""What waves cost: times from the end of the wave before to the end of a wave without prompts, by
rows and columns, so with what the host needs for it; and times of MTP drafts.

Times of single waves jump up, by much, and all of them change together when contexts grow or the
machine gets busy. So what is kept are multiples of a plain wave, and a wave is compared with those
just before it: the pace, what a plain wave would take now, is the median of what the last few
waves took, each by its multiple. It follows at once whatever changes all waves, and says nothing of
whether drafts pay. Multiples say it, and change only by probes: now and then some plain waves are
measured, and where they took about what those of the probe before took, the pace was the same in
between, and multiples are what the waves in between took of it. Probes are close to each other
where they were a surprise, and less and less so where they were not.

Medians decide whether drafts pay, but do not say all that is lost to them: some waves take far
longer, and more of those with drafts than of others. That part of it is kept as an average."""

from __future__ import annotations

from statistics import median

from kslserve.sched.spec.depth import CLEAR
from kslserve.sched.spec.price import GUESS, NUMBERS, Prices

PACE_WAVES = 5  # whose median is the pace
PROBE = 3  # plain waves that are measured at a time; and before anything is drafted
PROBE_SOON, PROBE_SELDOM = 16, 96  # waves with drafts between two such times, at first and most
STEADY = 1.15  # factor up to which two probes found the same pace
STEP = 0.1  # most that one measurement moves a figure
CLIP = 3.0  # drafts are charged with at most so many times what their wave was expected to take
# Of a plain wave, what drafts cost beside that: the plain ones that waves with drafts are compared
# with were looked at, and take longer than those that nobody looks at.
UNSEEN = 0.15
MEAN_RATE = 1 / 32  # weight of a wave in averages
FRESH = 16  # waves for which a table of multiples serves, once they are sure
# Part of the time that looks for drafts may take where they find nothing; the waves between two of
# them that follow from it, at least and at most.
LOOKS = 1 / 1000
PACE_MIN, PACE_MAX = 4, 64


class _Figure:
    """Follows the median of what is measured; begins with the least of the first few."""

    __slots__ = ("count", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 1

    def observe(self, value: float) -> None:
        self.count += 1
        if self.count <= PROBE:
            self.value = min(self.value, value)
        else:
            self.value = min(max(value, (1.0 - STEP) * self.value), (1.0 + STEP) * self.value)


class RowCosts:
    """Times of waves of a fixed number of decode rows, by their columns. gain: what the drafts
    chosen last were to gain: tokens in a time, of those of plain waves. saved: plain waves that
    drafts saved since the last probe, which whoever charges for them keeps."""

    __slots__ = (
        "_beyond", "_every", "_last", "_least", "_mean", "_pace", "_plain_ms", "_prices", "_probe",
        "_table", "_table_until", "_told", "_waves", "gain", "rows", "saved",
    )  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.gain = 1.0
        self.saved = 0.0
        self._prices = Prices(rows)
        self._pace = 0.0
        self._mean = 1.0  # of plain waves, in the pace
        self._beyond = 0.0  # of waves with drafts, in plain ones: what they take beyond that
        self._last: list[float] = []  # what the last waves took, as plain ones
        self._probe: list[float] = []  # plain waves of the probe that goes on
        self._plain_ms = 0.0  # what the last one found
        self._waves: list[tuple[int, float]] = []  # with drafts since then: their number, and ms
        self._told = 0.0  # how much longer than plain ones those were said to take
        self._every = PROBE_SOON
        self._table: list[float] = []
        self._least: dict[float, float] = {}
        self._table_until = 0

    @property
    def known(self) -> bool:
        """Plain waves were measured, so there is a pace."""
        return self._pace > 0.0

    @property
    def plain_due(self) -> bool:
        """The next wave should be plain, to see how long that takes."""
        if not self.known:
            return True
        return len(self._waves) >= self._every

    def observe(self, columns: int, ms: float, wave: int) -> float:
        """A wave of so many columns, with drafts among them or made beside it, took `ms`. wave: its
        id, larger than any before. How much longer than a plain one such a wave takes, in plain
        ones, as far as that is known yet."""
        prices, extra = self._prices, columns - self.rows
        if not self.known:
            return 0.0
        prices.now = wave
        expected, multiple, excess = self._multiple(extra), ms / self._pace, 0.0
        most = CLIP * expected
        if extra:
            self._waves.append((extra, ms))
            self._probe.clear()
            sure = prices.sure(extra)
            # Where it is not known what such waves take, this one may have been held up.
            excess = min(prices.observe(extra, multiple - 1.0), most - 1.0)
            if sure:
                self._went(ms / expected)
            else:
                self._table_until = 0
            self._told += excess
        beyond = min(multiple, most) / self._mean - 1.0 - excess
        self._beyond += MEAN_RATE * (beyond - self._beyond)
        return excess

    @property
    def beyond(self) -> float:
        """What a wave with drafts takes on average beyond what `observe` says of it, in plain
        ones."""
        return max(self._beyond, 0.0) + UNSEEN

    def plain(self, ms: float, wave: int) -> float | None:
        """A plain wave took `ms`. Where that ended a probe: how much more than was told the waves
        with drafts before it take, in plain ones; 0 where that cannot be said."""
        owed = None
        self._prices.now = wave
        if self.known:
            self._mean += MEAN_RATE * (min(ms / self._pace, CLIP) - self._mean)
        self._went(ms)
        self._probe.append(ms)
        if len(self._probe) == PROBE:
            if not self.known or self._waves:
                owed = self._probed(median(self._probe))
            self._probe.clear()
        return owed

    def ms(self, columns: int) -> float:
        """Expected time of a wave; a pace is a condition. Hopeful where little was measured, or it
        would never be."""
        return self._pace * self._multiple(columns - self.rows)

    def table(self, most: int, gain: float) -> tuple[list[float], float]:
        """Expected times of waves, in plain ones, by their drafts. And, of up to `most` drafts, the
        tokens that each draft must promise to be worth anything: if all of some number of them
        promised as much, the wave would just gain `gain` over a plain one. `most` is always the
        same."""
        times = self._multiples()
        least = self._least.get(gain)
        if least is None:
            least = self._least[gain] = min(
                (self.rows * (gain * times[n] - 1.0) / n for n in range(1, most + 1)), default=2.0
            )
        return times, least

    def _multiples(self) -> list[float]:
        if self._prices.now >= self._table_until:
            self._table_until = self._prices.now + FRESH
            self._table = self._prices.multiples()
            self._least.clear()
        return self._table

    def _multiple(self, extra: int) -> float:
        times, most = self._multiples(), NUMBERS[-1]
        return times[extra] if extra <= most else 1.0 + (times[most] - 1.0) * extra / most

    def _probed(self, ms: float) -> float:
        """Plain waves took `ms`, behind waves with drafts; what was not told of these."""
        owed, before = 0.0, self._plain_ms
        if self._waves and 1.0 / STEADY <= ms / before <= STEADY:
            plain = (ms * before) ** 0.5
            agreed = self._prices.correct((n, taken / plain) for n, taken in self._waves)
            self._table_until = 0
            owed = sum(self._prices.excess(n) for n, _ in self._waves) - self._told
            certain = agreed or self._clear(owed)
            self._every = min(2 * self._every, PROBE_SELDOM) if certain else PROBE_SOON
        elif not self._clear(0.0):
            self._every = PROBE_SOON
        self._told = self.saved = 0.0
        self._waves.clear()
        self._plain_ms = self._pace = ms
        self._last = [ms] * PROBE
        return owed

    def _clear(self, owed: float) -> bool:
        """Drafts gained so much since the last probe, though what they took was told too low by
        `owed`."""
        return self.saved - owed > (CLEAR - 1.0) * (len(self._waves) + self._told + owed)

    def _went(self, taken: float) -> None:
        self._last.append(taken)
        del self._last[:-PACE_WAVES]
        if self.known:
            self._pace = median(self._last)


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
        self.pace = round(min(max(self._look.value / LOOKS, PACE_MIN), PACE_MAX))

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
            return self._drafts[rows].value
        if not self._drafts:
            return GUESS * plain_ms
        nearest = min(self._drafts, key=lambda known: abs(known - rows))
        return self._drafts[nearest].value
