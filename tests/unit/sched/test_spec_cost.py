"""What waves cost: multiples of a plain wave that neither single slow waves nor changes of pace
move, and what drafts may lose."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.spec.acceptance import Kept
from kslserve.sched.spec.allowance import DEBT, EARNED, FIRST, MOST, OWED, PART, Allowance
from kslserve.sched.spec.cost import (
    LOOKS,
    PACE_MAX,
    PACE_MIN,
    PROBE,
    PROBE_SELDOM,
    PROBE_SOON,
    UNSEEN,
    RowCosts,
    WaveCosts,
)
from kslserve.sched.spec.depth import GAIN, STAY, choose_lanes
from kslserve.sched.spec.price import DOUBTFUL, GUESS, HOPE, NUMBERS, STALE, SURE


class Measured(RowCosts):
    """Numbers the waves."""

    def __init__(self, rows: int, plain_ms: float = 0.0) -> None:
        super().__init__(rows)
        self.wave = 0
        if plain_ms:
            self.see(rows, plain_ms, PROBE)

    def see(self, columns: int, ms: float, times: int = 1) -> None:
        for _ in range(times):
            self.wave += 1
            if columns > self.rows:
                self.observe(columns, ms, self.wave)
            else:
                self.plain(ms, self.wave)


def test_costs_are_learnt_by_columns() -> None:
    costs = Measured(2, 10.0)
    assert costs.ms(2) == pytest.approx(10.0)
    hopeful = 1.0 - HOPE
    assert costs.ms(12) == pytest.approx(10.0 + 10 * GUESS / 2 * 10.0 * hopeful)
    costs.see(10, 18.0, 5)
    assert costs.ms(10) == pytest.approx(18.0)
    # What was not measured costs as much a column, and that is hopeful.
    assert costs.ms(6) == pytest.approx(10.0 + 4 * 1.0 * hopeful)
    assert costs.ms(18) == pytest.approx(10.0 + 16 * 1.0 * hopeful)
    # A few measurements have to agree that it is slow.
    costs.see(6, 160.0)
    assert costs.ms(6) == pytest.approx(13.2)
    costs.see(6, 14.0, 2)
    assert costs.ms(6) == pytest.approx(14.0)


def test_a_slow_wave_changes_little_and_a_slow_first_one_nothing() -> None:
    costs = Measured(1)
    for ms in (500.0, 10.0, 10.0):
        assert not costs.known
        assert costs.plain_due
        costs.see(1, ms)
    assert costs.ms(1) == pytest.approx(10.0)
    costs.see(1, 1000.0, 2)
    assert costs.ms(1) == pytest.approx(10.0)
    costs.see(4, 15.0, 10)
    costs.see(4, 400.0)
    assert costs.ms(4) == pytest.approx(15.0, rel=0.15)


@given(st.permutations([15.0, 15.3, 14.7, 15.1, 14.9, 15.0, 15.0, 60.0, 120.0]))
def test_a_price_is_the_median(times: list[float]) -> None:
    """However far off some measurements are."""
    costs = Measured(1, 10.0)
    for _ in range(8):
        for ms in times:
            costs.see(4, ms)
        costs.see(1, 10.0, PROBE)
    assert costs.ms(4) / costs.ms(1) == pytest.approx(1.5, rel=0.35)


def test_what_changes_all_times_changes_no_multiple() -> None:
    """And nobody has to measure a plain wave to know how long one takes now."""
    costs = Measured(1, 10.0)
    costs.see(4, 15.0, 10)
    costs.see(4, 33.0, 10)
    assert costs.ms(1) == pytest.approx(22.0, rel=0.1)
    assert costs.ms(4) / costs.ms(1) == pytest.approx(1.5, rel=0.1)
    costs.see(1, 22.0, PROBE)
    assert costs.ms(4) / costs.ms(1) == pytest.approx(1.5, rel=0.1)


def test_what_changes_only_waves_with_drafts_shows_beside_plain_ones() -> None:
    costs = Measured(1, 10.0)
    costs.see(4, 15.0, 10)
    probes = 0
    while costs.ms(4) / costs.ms(1) < 2.8:
        costs.see(*((1, 10.0) if costs.plain_due else (4, 30.0)))
        probes += costs.plain_due
    assert probes <= 12 * PROBE


def test_a_probe_says_nothing_of_waves_that_were_not_measured_since() -> None:
    costs = Measured(1, 10.0)
    costs.see(33, 60.0, SURE)
    costs.see(4, 15.0, PROBE_SOON)
    costs.see(1, 10.0, PROBE)
    costs.see(4, 30.0, PROBE_SOON)
    costs.see(1, 10.0, PROBE)
    assert costs.ms(33) == pytest.approx(60.0, rel=0.1)


def test_what_waves_took_is_told_in_the_end() -> None:
    """Whatever they seemed to take before they could be compared with plain ones."""
    costs = Measured(1, 10.0)
    costs.see(4, 15.0, SURE)
    costs.see(1, 10.0, PROBE)
    told = 0.0
    for _ in range(10):
        costs.wave += 1
        told += costs.observe(4, 25.0, costs.wave)
    owed = [costs.plain(10.0, costs.wave + i) for i in range(1, PROBE + 1)]
    assert owed[:-1] == [None] * (PROBE - 1)
    assert owed[-1] is not None
    assert told + owed[-1] == pytest.approx(10 * 1.5)
    assert told < 10 * 1.0


@pytest.mark.parametrize(("columns", "ms"), [(1, 10.0), (4, 15.0)])
def test_what_no_median_says_is_an_average(columns: int, ms: float) -> None:
    """One wave with drafts in five takes twice as long, and no plain one."""
    costs = Measured(1, 10.0)

    def drafts(ms: float, times: int) -> None:
        for _ in range(times):
            costs.wave += 1
            costs.observe(columns, ms, costs.wave)

    drafts(ms, 40)
    assert costs.beyond == pytest.approx(UNSEEN, abs=0.01)
    for _ in range(40):
        drafts(ms, 4)
        drafts(2.0 * ms, 1)
    assert costs.beyond - UNSEEN == pytest.approx(0.2 * ms / 10.0, rel=0.3)
    costs.see(1, 10.0, PROBE)
    drafts(ms, 200)
    assert costs.beyond == pytest.approx(UNSEEN, abs=0.02)


def test_when_plain_waves_are_due() -> None:
    costs = Measured(1, 10.0)
    every = PROBE_SOON
    while every < 2 * PROBE_SELDOM:
        for _ in range(min(every, PROBE_SELDOM)):
            assert not costs.plain_due
            costs.see(4, 20.0)
        for _ in range(PROBE):
            assert costs.plain_due
            costs.see(1, 10.0)
        assert not costs.plain_due
        every *= 2  # since nothing was a surprise
    # Plain waves that come anyhow serve as well.
    costs.see(4, 20.0, PROBE_SELDOM - 1)
    costs.see(1, 10.0, PROBE)
    costs.see(4, 20.0, PROBE_SELDOM - 1)
    assert not costs.plain_due
    # A surprise is looked into soon.
    costs.see(1, 10.0, PROBE)
    costs.see(4, 30.0, PROBE_SELDOM)
    costs.see(1, 10.0, PROBE)
    costs.see(4, 30.0, PROBE_SOON)
    assert costs.plain_due
    # But for where drafts gain so much that what they cost decides nothing.
    costs.see(1, 10.0, PROBE)
    costs.see(4, 30.0, PROBE_SOON)
    costs.see(1, 10.0, PROBE)
    while costs._every < PROBE_SELDOM:
        costs.see(*((1, 10.0) if costs.plain_due else (4, 30.0)))
    for saved, every in ((5.0, PROBE_SELDOM), (-1.5, PROBE_SOON)):
        for ms in (40.0, 30.0):
            costs.see(4, ms, PROBE_SELDOM)
            costs.saved = saved * PROBE_SELDOM
            costs.see(1, 10.0, PROBE)
        costs.see(4, 30.0, every - 1)
        assert not costs.plain_due
        costs.see(4, 30.0)
        assert costs.plain_due
        costs.see(1, 10.0, PROBE)


def test_what_much_is_gained_by_is_what_waves_did_take() -> None:
    """Not what they were thought to take: or a price that is too low would never be looked into."""
    for ms, every in ((30.0, PROBE_SELDOM), (80.0, PROBE_SOON)):
        costs = Measured(1, 10.0)
        costs.see(4, 20.0, SURE)
        while costs._every < PROBE_SELDOM:
            costs.see(*((1, 10.0) if costs.plain_due else (4, 20.0)))
        costs.see(4, ms, PROBE_SELDOM)
        costs.saved = 3.0 * PROBE_SELDOM
        costs.see(1, 10.0, PROBE)
        assert costs._every == every


def test_a_table_of_times() -> None:
    costs = Measured(2, 10.0)
    costs.see(4, 19.0, 5)
    costs.see(6, 12.0, 5)
    costs.see(2, costs.ms(2), PROBE)
    times, least = costs.table(4, gain=1.0)
    assert times[0] == 1.0
    # Fewer columns take no more than more of them, whatever was measured.
    assert times == sorted(times)
    assert times[2] <= times[4]
    assert len(times) == NUMBERS[-1] + 1
    assert least == pytest.approx(2 * (times[4] - 1.0) / 4)
    assert costs.table(4, gain=1.1)[1] > least


def test_a_price_that_was_not_seen_for_long_is_learnt_anew() -> None:
    costs = Measured(1, 10.0)
    costs.see(17, 90.0, SURE)
    assert costs.ms(17) == pytest.approx(90.0)
    costs.see(9, 58.0, STALE + 20)
    costs.see(1, 10.0, PROBE)
    assert costs.ms(17) == pytest.approx(10.0 + 80.0 * (1.0 - HOPE), rel=0.1)
    costs.see(17, 26.0, SURE)
    assert costs.ms(17) == pytest.approx(26.0, rel=0.1)


def test_a_price_above_that_of_fewer_columns_is_doubted_soon() -> None:
    """The machine was slow while it was measured: it is tried again, and learnt anew."""
    costs = Measured(1, 10.0)
    costs.see(17, 180.0, SURE)
    for columns in (5, 9):
        costs.see(columns, 10.0 + 5.0 * (columns - 1), SURE)
    assert costs.ms(17) > 150.0
    costs.see(9, 50.0, DOUBTFUL)
    costs.see(1, 10.0, PROBE)
    assert costs.ms(17) == pytest.approx(90.0, rel=0.1)
    costs.see(17, 88.0, SURE)
    assert costs.ms(17) == pytest.approx(88.0, rel=0.1)


def test_a_price_that_does_rise_stays() -> None:
    """It is tried again, and found to be what it was."""
    costs = Measured(1, 10.0)
    costs.see(9, 15.0, SURE)
    costs.see(17, 80.0, SURE)
    costs.see(9, 15.0, DOUBTFUL)
    costs.see(17, 80.0, SURE)
    costs.see(9, 15.0)
    assert costs.ms(17) == pytest.approx(80.0, rel=0.1)


def test_where_nothing_is_drafted_prices_are_hoped_to_fall() -> None:
    costs = Measured(1, 10.0)
    costs.see(9, 90.0, SURE)
    before = costs.ms(9)
    for _ in range(40):
        costs.wave += STALE // 8
        costs.see(1, 10.0)
    assert costs.ms(1) == pytest.approx(10.0)
    assert costs.ms(9) < 0.5 * before


def test_looks_in_vain_are_far_between_where_they_take_time() -> None:
    costs = WaveCosts()
    assert costs.pace == PACE_MIN
    for _ in range(10):
        costs.looked(0.01, 100.0)
    assert costs.pace == PACE_MIN
    for _ in range(100):
        costs.looked(0.009, 0.3)
    assert costs.pace == pytest.approx(0.03 / LOOKS, rel=0.1)
    for _ in range(60):
        costs.looked(3.0, 0.3)
    assert costs.pace == PACE_MAX


def test_draft_steps() -> None:
    costs = WaveCosts()
    assert costs.draft_ms(1, 10.0) == GUESS * 10.0
    for _ in range(10):
        costs.drafted(4, 3, 9.0)
    assert costs.draft_ms(4, 10.0) == pytest.approx(3.0)
    assert costs.draft_ms(1, 10.0) == pytest.approx(3.0)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(-3.0, 3.0)), max_size=300))
def test_no_more_is_lost_than_the_allowance(rounds: list[tuple[int, float]]) -> None:
    allowance = Allowance()
    wave, lost, most, rows_seen = 0, 0.0, 0.0, set()
    for rows, saved in rounds:
        rows_seen.add(rows)
        wave += 1 + allowance.waves(rows, wave + 1)
        while allowance.waves(rows, wave):
            wave += 1
        allowance.settle(rows, saved)
        lost -= saved
        most = max(most, -saved)
        assert lost <= PART * wave + len(rows_seen) * (FIRST + most)


def test_what_could_not_be_kept_pays_first() -> None:
    allowance = Allowance()
    allowance.settle(1, EARNED + 50.0)
    allowance.correct(1, EARNED + 45.0)
    allowance.settle(1, 0.5 - EARNED)
    assert not allowance.waves(1, 1)
    allowance.correct(1, 1.0)
    assert allowance.waves(1, 2)
    allowance.correct(1, -2.0)
    assert not allowance.waves(1, 3)


def test_corrections_end_at_a_debt() -> None:
    allowance = Allowance()
    allowance.correct(1, OWED)
    assert 0.9 * DEBT / PART < allowance.waves(1, 1) <= 1 + DEBT / PART
    allowance.settle(1, -1.0)
    allowance.correct(1, OWED)  # nor is any of what a round lost given back
    assert allowance.waves(1, 1) > 0.9 * (DEBT + 1.0) / PART


def test_an_allowance_comes_back() -> None:
    allowance = Allowance()
    assert allowance.waves(1, 1) == 0
    allowance.settle(1, -FIRST - 1.0)
    pause = allowance.waves(1, 2)
    assert 0.8 / PART < pause <= 1 + 1.0 / PART
    assert allowance.waves(2, 3) == 0
    assert allowance.waves(1, 3 + pause) == 0
    allowance.settle(1, 2.0 * EARNED)
    allowance.settle(1, -EARNED - 2 * PART)
    assert allowance.waves(1, 4 + pause) > 0


def test_waiting_saves_up_less_than_gains() -> None:
    allowance = Allowance()
    allowance.settle(1, MOST)
    assert allowance.waves(1, 10**6) == 0  # time takes nothing away, and adds nothing to it
    allowance.settle(1, -MOST - FIRST / 2)
    assert allowance.waves(1, 10**6) == 0
    assert allowance.waves(1, 2 * 10**6) == 0
    allowance.settle(1, -MOST + 2 * PART)
    assert allowance.waves(1, 2 * 10**6) == 0
    allowance.settle(1, -3 * PART)
    assert allowance.waves(1, 2 * 10**6) == 2


@dataclass(slots=True)
class Machine:
    """Times of waves of a machine that is at times half as fast for some hundred waves, and in
    which some waves take three times as long. column: what a further column costs, in plain
    waves."""

    dice: random.Random
    column: float
    slow: bool = False
    left: int = 0

    def cost(self, extra: int) -> float:
        """Of further columns, in plain waves."""
        return self.column * extra + (0.05 if extra else 0.0)

    def ms(self, extra: int) -> float:
        if not self.left:
            self.slow, self.left = not self.slow, self.dice.randrange(20, 400)
        self.left -= 1
        ms = (1.0 + self.cost(extra)) * self.dice.uniform(0.95, 1.1)
        return ms * (2.2 if self.slow else 1.0) * (3.0 if self.dice.random() < 0.03 else 1.0)


WAVES = 6000


def decode(machine: Machine, rows: int, promised: float, kept: float) -> tuple[float, int]:
    """Rows that verify what is worth it, of ten drafts each, which are promised to come true so
    often, and do. Tokens per time, of what plain waves give, and waves with drafts."""
    costs, allowance, trust = RowCosts(rows), Allowance(), Kept()
    survival = [[promised ** (i + 1) for i in range(10)]] * rows
    tokens = time = float(WAVES)
    drafting = 0
    for wave in range(1, WAVES + 1):
        count = [0] * rows
        if not costs.plain_due and not allowance.waves(rows, wave):
            gain = STAY if costs.gain > 1.0 else GAIN
            times = costs.table(60, gain)[0]
            count, costs.gain = choose_lanes(
                survival, lambda n, t=times: t[n - rows], rows, 60, gain, trust.part
            )
        extra = sum(count)
        accepted = 0
        for n in filter(None, count):
            hits = 0
            while hits < n and machine.dice.random() < kept:
                hits += 1
            accepted += hits
            trust.note(sum(survival[0][:n]), hits)
        ms = machine.ms(extra)
        if not extra:
            owed = costs.plain(ms, wave)
            if owed is not None:
                allowance.correct(rows, owed)
        else:
            saved = accepted / rows - costs.observe(rows + extra, ms, wave)
            allowance.settle(rows, saved - costs.beyond)
            drafting += 1
            tokens += accepted / rows
            time += machine.cost(extra)
    return tokens / time, drafting


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_choice_is_stable_on_a_machine_that_is_not(seed: int, rows: int) -> None:
    """Where columns cost three fifths of a row, drafts that come true are made, and
    gain."""
    gain, drafting = decode(Machine(random.Random(seed), 0.6 / rows), rows, 0.97, 0.97)
    assert drafting > 0.6 * WAVES
    assert gain > 1.25


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(("column", "kept"), [(0.2, 0.0), (0.5, 0.3), (1.1, 0.97), (0.95, 0.95)])
def test_little_is_lost_where_drafts_do_not_pay(
    seed: int, rows: int, column: float, kept: float
) -> None:
    """Because they never come true, though they promise to, or because columns cost too much."""
    gain, _ = decode(Machine(random.Random(seed), column / rows), rows, 0.95, kept)
    assert gain > 0.98
