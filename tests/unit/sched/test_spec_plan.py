"""Pure parts of speculation: what is expected of drafts, what waves cost, how much is drafted, and
when it is given up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.core.sampling import SamplingParams
from kslserve.engine.types import Done, RowDone
from kslserve.sched.job import Job
from kslserve.sched.plan import WaveCost
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.acceptance import (
    DEPTH_FADE,
    DEPTH_KNOWN,
    DEPTH_PRIOR,
    DEPTH_WEIGHT,
    LEAST,
    MATCH_PRIOR,
    MATCHES,
    Averages,
    Kept,
    chain_survival,
    match_class,
    suffix_survival,
)
from kslserve.sched.spec.charge import charge
from kslserve.sched.spec.choice import Choice
from kslserve.sched.spec.cost import PROBE, RowCosts, WaveCosts
from kslserve.sched.spec.depth import ALIKE, CLEAR, GAIN, choose_depths, choose_lanes
from kslserve.sched.spec.drafter import NEAR_MAX, STANDS, STRONG, Drafter
from kslserve.sched.spec.index import SuffixIndex
from kslserve.sched.spec.ladder import ROUNDS, Ladder
from kslserve.sched.spec.patience import PAUSE_FIRST, PAUSE_LAST, ROUND, TRIAL_FIRST, Patience

CHANCES = st.lists(
    st.lists(st.floats(0.01, 1.0), max_size=6).map(lambda p: list(itertools.accumulate(p, min))),
    min_size=1,
    max_size=3,
)


def test_classes_of_matches() -> None:
    for which, least in enumerate(MATCHES):
        assert match_class(least) == which
        assert match_class(least - 1 if which else least) == max(which - 1, 0)
    assert match_class(10_000) == len(MATCHES) - 1


def test_averages_follow_and_teach() -> None:
    everybody = Averages(MATCH_PRIOR)
    one = everybody.child()
    for _ in range(200):
        one.note(2, True)
    assert one.values[2] > 0.99
    assert MATCH_PRIOR[2] < everybody.values[2] < 0.99
    assert everybody.child().values[2] == everybody.values[2]
    assert one.values[1] == MATCH_PRIOR[1]
    for _ in range(40):
        one.note(2, False)
    assert one.values[2] < 0.1


def test_averages_that_know_little_learn_fast() -> None:
    everybody = Averages(DEPTH_PRIOR, DEPTH_WEIGHT)
    one = everybody.child()
    for _ in range(6):
        one.note(0, True)
    assert one.values[0] > 0.85
    assert everybody.values[0] > 0.85
    # The next one begins there, and needs few outcomes to see that it is different.
    other = everybody.child()
    for _ in range(3):
        other.note(0, False)
    assert other.values[0] < 0.6


def test_many_hits_at_once_are_as_many_single_ones() -> None:
    one, other = Averages(MATCH_PRIOR).child(), Averages(MATCH_PRIOR).child()
    for _ in range(5):
        one.note(4, True)
    other.note_hits(4, 5)
    for a, b in ((one, other), (one.parent, other.parent)):
        assert a is not None
        assert b is not None
        assert a.values == pytest.approx(b.values, abs=0.02)
        assert a.weights == b.weights


def test_depths_that_few_chains_reached_are_like_the_one_before() -> None:
    chain = Averages(DEPTH_PRIOR, DEPTH_WEIGHT)
    for _ in range(20):
        chain.note(0, True)
    first, second, third = chain_survival(chain, 3)
    assert second == pytest.approx(first * first * DEPTH_FADE)
    assert third == pytest.approx(second * first * DEPTH_FADE**2)
    for _ in range(DEPTH_KNOWN):
        chain.note(1, False)
    assert chain_survival(chain, 3)[1] < 0.4


def test_what_drafts_keep_of_what_they_promise() -> None:
    kept = Kept()
    first = kept.part
    for _ in range(100):
        kept.note(4.0, 4)
    assert first < 0.9 < kept.part <= 1.0
    for _ in range(200):
        kept.note(4.0, 3)
    assert kept.part == pytest.approx(0.75, abs=0.01)
    for _ in range(200):
        kept.note(4.0, 0)
    assert 0.0 < kept.part <= 0.5


def test_survival_is_a_product_and_ends_where_nothing_is_left() -> None:
    matches = Averages((0.5, 0.8, 0.8, 0.8, 0.8, 0.8, 1.0))
    assert suffix_survival(matches, 3, 3) == pytest.approx([0.5, 0.4, 0.32])
    assert suffix_survival(matches, 40, 15) == [1.0] * 15
    assert suffix_survival(matches, 40, 2, start=0.25) == [0.25, 0.25]
    chain = Averages((0.2,) * len(DEPTH_PRIOR), DEPTH_KNOWN)
    assert chain_survival(chain, 16) == [0.2]
    assert len(chain_survival(chain, 16, least=0.0)) == 16
    assert chain_survival(Averages((LEAST / 2, *DEPTH_PRIOR[1:])), 3) == []


def test_a_drafter_without_prospects_sleeps_longer_and_longer() -> None:
    drafter = Drafter(None, None, Patience(), 15)
    wave, looks = 10, []
    while wave < 300:
        looks.append(wave)
        drafter.doze(wave, 40)
        wave = drafter.asleep_until
    # At multiples of a quarter of the pace: it meets others there.
    assert looks[:5] == [10, 20, 70, 120, 170]
    # Where it drafted before, less so.
    drafter.ladder.round(3)
    drafter.held = [1]
    drafter.doze(90, 40)
    drafter.held = []
    for waves in (1, 2, *(NEAR_MAX,) * 5, 8, 16, 32, 40, 40):
        drafter.doze(100, 40)
        grid = min(waves, 10)
        assert 101 + waves <= drafter.asleep_until < 101 + waves + grid
        assert drafter.asleep_until % grid == 0
    drafter.held = [1]
    drafter.doze(200, 40)
    assert drafter.asleep_until < 200


@given(CHANCES, st.floats(0.0, 1.0), st.integers(0, 12))
def test_lanes_are_the_best_of_all_choices(
    survival: list[list[float]], slope: float, most: int
) -> None:
    rows = len(survival) + 1

    def ms(columns: int) -> float:
        return 1.0 + slope * (columns - rows)

    def rate(counts: tuple[int, ...]) -> float:
        gained = sum(sum(chances[:n]) for chances, n in zip(survival, counts, strict=True))
        return (rows + trust * gained) / ms(rows + sum(counts))

    trust = 0.8
    counts, gain = choose_lanes(survival, ms, rows, most, GAIN, trust)
    assert sum(counts) <= most
    choices = itertools.product(*(range(len(chances) + 1) for chances in survival))
    best = max(rate(choice) for choice in choices if sum(choice) <= most)
    if any(counts):
        if best <= CLEAR * rows:
            assert rate(tuple(counts)) == pytest.approx(best)
        assert rate(tuple(counts)) > (1.0 - ALIKE) * best
        assert best > GAIN * rows
        assert gain == pytest.approx(best / rows)
    else:
        assert gain == 1.0
        assert best <= GAIN * rows * (1 + 1e-9)


@pytest.mark.parametrize(("dear", "verified"), [(1.0, 12), (1.1, 12), (1.5, 8)])
def test_where_much_is_gained_all_sure_drafts_are_verified(dear: float, verified: int) -> None:
    """Though waves of more than eight seem to cost a little more than their share, but not where
    they seem to cost far more; and no draft that is not sure."""
    sure, rest = [0.99**i for i in range(1, 11)], [0.91, 0.9, 0.2]

    def ms(columns: int) -> float:
        return 1.0 + 0.3 * (columns - 1) * (dear if columns > 9 else 1.0)

    counts, gain = choose_lanes([sure + rest], ms, 1, 15, GAIN, 1.0)
    assert counts == [verified]
    assert gain > CLEAR


def test_depths_pay_for_their_steps() -> None:
    chances = [[0.9, 0.8, 0.7], [0.2]]

    def cheap(columns: int) -> float:
        return 10.0

    assert choose_depths(chances, cheap, lambda n: 0.01, 2, 10) == [3, 1]
    assert choose_depths(chances, cheap, lambda n: 1.0 * n, 2, 10) == [3, 0]
    assert choose_depths(chances, cheap, lambda n: 100.0, 2, 10) == [0, 0]
    # A second row in a step that is taken anyway costs only what it adds.
    both = choose_depths([[0.9], [0.5]], cheap, lambda n: 1.0 + 0.1 * n, 2, 10)
    assert both == [1, 1]
    assert choose_depths([[], []], cheap, lambda n: 0.0, 2, 10) == [0, 0]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(("column", "drafted"), [(0.02, True), (0.3, False)])
def test_beside_prompts_drafts_are_weighed_as_without(
    prompt: bool, column: float, drafted: bool
) -> None:
    """However much longer such a wave takes: that passes whoever drafts."""
    costs, mixed, rows = WaveCosts(), WaveCost(50.0, 250.0, 512), 8
    for columns in (rows, 256 + rows, 512 + rows):
        mixed.observe(columns, columns - rows, 2.0 + 0.01 * columns)
    of = costs.of(rows)
    for wave in range(1, PROBE + 1):
        of.plain(2.0, wave)
    for n in (2, 4, 15):
        for _ in range(3):
            of.observe(rows + n, 2.0 * (1.0 + column * n), PROBE + 1)
    job = Job(np.array([1, 2, 3, 4] * 9, np.int32), 100, SamplingParams(temperature=0.0), 1)
    drafters = [Drafter(Averages(MATCH_PRIOR), None, Patience(), 15) for _ in range(2)]
    drafting = []
    for drafter in drafters:
        sequence = Sequence(1, job, None, 0.0)  # type: ignore[arg-type]
        drafter.read(sequence)
        drafting.append((sequence, drafter, True))
    Choice(costs, mixed, Kept(), 15, 0).aim(drafting, rows, prompt, 100, PROBE + 2)
    assert all(bool(drafter.lanes) == drafted for drafter in drafters)


def test_trials_are_made_less_and_less_often() -> None:
    """By one sequence at a time, whichever comes next; each ends where it fails."""
    patience = Patience()
    begun = []
    for number in range(40):
        drafter = Drafter(None, Averages(DEPTH_PRIOR, DEPTH_WEIGHT), patience, 15)
        for wave in range(100 * number, 100 * number + 100):
            drafter.offer(15)
            if drafter.promises(0.9, 0.9, wave):
                drafter.aim(0, 0, 15, wave)
                if drafter.propose:
                    begun.append(wave)
                drafter.learn(RowDone(0, (1,), 1, drafts=(2,) * drafter.propose))
    # A draft that is wrong twice ends a trial; the last one is only seen to be behind it.
    starts = [wave for wave in begun if wave - 1 not in begun]
    assert starts[0] == 0
    assert len(begun) <= 3 * len(starts)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert len(starts) <= 8
    # None is made where no draft can pay.
    drafter = Drafter(None, Averages(DEPTH_PRIOR, DEPTH_WEIGHT), patience, 15)
    assert drafter.promises(0.9, 0.9, patience.trial_at)
    assert not drafter.promises(0.9, 1.1, patience.trial_at)
    # Nor beside drafts of the index, which say nothing of it.
    drafter = Drafter(Averages(MATCH_PRIOR), Averages(DEPTH_PRIOR), patience, 15)
    drafter.index = SuffixIndex(np.array([1, 2, 3, 4] * 5, np.int32))
    drafter.offer(15)
    drafter.aim(3, 0, 15, patience.trial_at)
    assert (drafter.lanes, drafter.propose) == ([1, 2, 3], 0)
    drafter.aim(0, 0, 15, patience.trial_at)
    assert drafter.propose == 1
    # Where drafts pay, they are tried soon again.
    patience.gained()
    patience.tried(5000)
    assert patience.trial_at == 5000 + TRIAL_FIRST


@pytest.mark.parametrize(("repeats", "first"), [(2, True), (9, True), (2, False), (9, False)])
def test_no_chain_is_made_beside_a_sure_match(repeats: int, first: bool) -> None:
    """However short it is, if such matches come true."""
    chance = STRONG if first else STRONG - 0.01
    drafter = Drafter(Averages((chance,) * len(MATCH_PRIOR)), Averages(DEPTH_PRIOR), Patience(), 15)
    assert drafter.chances(3)
    drafter.index = SuffixIndex(np.array([1, 2, 3, 4] * repeats, np.int32))
    assert bool(drafter.chances(3)) is not first


def test_a_choice_stands_while_all_comes_true() -> None:
    period = list(range(40))
    text = np.array(period * 3, np.int32)

    def chosen(history: np.ndarray, lanes: int, most: int = 7) -> Drafter:
        drafter = Drafter(Averages(MATCH_PRIOR), None, Patience(), 15)
        drafter.index = SuffixIndex(history)
        drafter.offer(most)
        drafter.aim(lanes, 0, 0, 1)
        return drafter

    def verify(drafter: Drafter, accepted: int) -> None:
        """So many of the drafts of a row come true, and what follows them."""
        assert drafter.index is not None
        tokens = drafter.index.draft(accepted + 1)
        drafter.learn(RowDone(0, tuple(tokens), accepted + 1, accepted))
        drafter.index.extend(tokens)

    drafter = chosen(text, 7)
    for turn in range(STANDS):
        verify(drafter, 7)
        assert drafter.again(20)
        at = 8 * (turn + 1) % 40
        assert drafter.lanes == [*period, *period][at : at + 7]
    verify(drafter, 7)
    assert not drafter.again(20)
    drafter = chosen(text, 7)
    verify(drafter, 7)
    assert drafter.again(3)
    assert len(drafter.lanes) == 3
    # Not where one failed, where more of them may be worth it now, and where they are suspended.
    drafter = chosen(text, 7)
    verify(drafter, 6)
    assert not drafter.again(20)
    for drafter in (chosen(text, 7, 15), chosen(text[: 40 + MATCHES[-1] - 1], 7)):
        verify(drafter, 7)
        assert not drafter.again(20)
    drafter = chosen(text, 7)
    verify(drafter, 7)
    for _ in range(2):
        drafter.settle(-10.0, 1)
    assert not drafter.again(20)


def test_chains_that_are_cut_off_at_once_promise_little() -> None:
    drafter = Drafter(None, Averages((0.9,) * len(DEPTH_PRIOR)), Patience(), 15)
    before = drafter.chances(1)
    for _ in range(20):
        drafter.aim(0, 1, 15, 0)
        drafter.learn(RowDone(0, (1,), 1))
    assert drafter.chances(1)[0] < 0.15 * before[0]


def test_drafts_that_cost_more_than_they_save_pause() -> None:
    patience = Patience()

    def pause(saved: float) -> int:
        """Waves for which a drafter pauses that saves so much in each wave, at most 100."""
        drafter = Drafter(Averages(MATCH_PRIOR), None, patience, 15)
        for wave in range(100):
            drafter.settle(saved, wave)
            if drafter.asleep_until:
                return drafter.asleep_until - wave
        return 0

    # Each of them knows of the ones before it, and that is forgotten where drafts pay.
    pauses = [pause(-0.5) for _ in range(12)]
    assert pauses[:3] == [2 * PAUSE_FIRST, 4 * PAUSE_FIRST, 8 * PAUSE_FIRST]
    assert pauses[-1] == PAUSE_LAST
    assert pause(-0.01) == 0
    for _ in range(12):
        assert pause(0.5) == 0
    assert pause(-0.5) == 2 * PAUSE_FIRST


def test_one_lost_round_suspends_nothing() -> None:
    drafter = Drafter(Averages(MATCH_PRIOR), None, Patience(), 15)
    drafter.settle(-10.0, 1)
    drafter.settle(4.0, 2)
    drafter.settle(-10.0, 3)
    assert not drafter.asleep_until
    drafter.settle(-10.0, 4)
    assert drafter.asleep_until == 4 + 2 * PAUSE_FIRST


@pytest.mark.parametrize("rounds", [0.5, 3.0, 200.0])
def test_catching_up_is_charged_like_any_round(rounds: float) -> None:
    """Keys and values of MTP that waited for a whole answer take their time in one wave: drafts of
    all kinds would be suspended for thousands of waves."""
    costs = RowCosts(2)
    for wave in range(PROBE):
        costs.plain(10.0, wave)
    drafter = Drafter(Averages(MATCH_PRIOR), Averages(DEPTH_PRIOR), Patience(), 15)
    done = Done(9, [], 0, 0, 0, int(10e6 * rounds))
    saved = charge(costs, done, [(drafter, 0, 1, RowDone(0, (5,), 1))], 2, 0.0, 9)
    assert saved == -min(rounds, ROUND)
    assert not drafter.asleep_until


def test_the_ladder_goes_down_only() -> None:
    ladder = Ladder(15)
    for _ in range(100):
        assert not ladder.round(3)
    depths = []
    for _ in range(20 * ROUNDS):
        if ladder.round(0):
            depths.append(ladder.depth)
    assert depths == [5, 2, 1, 0]
    assert [depth for _, depth, _ in ladder.events] == depths
    assert not ladder.round(9)
    assert not ladder.failed("late")
    assert ladder.depth == 0
    other = Ladder(7)
    assert other.failed("why")
    assert (other.depth, other.events) == (0, [(0, 0, "why")])
