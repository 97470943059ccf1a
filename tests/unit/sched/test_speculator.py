"""What the speculator makes of the times of waves."""

from __future__ import annotations

import pytest

from kslserve.engine.types import Done, EngineInfo, RowDone
from kslserve.metrics import Metrics
from kslserve.sched.plan import WaveCost
from kslserve.sched.spec.acceptance import DEPTH_PRIOR, Averages
from kslserve.sched.spec.allowance import FIRST, PART
from kslserve.sched.spec.charge import BEHIND, drafts_took
from kslserve.sched.spec.cost import CLIP, PROBE, WaveCosts
from kslserve.sched.spec.drafter import Drafter
from kslserve.sched.spec.patience import Patience
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.sched.spec.speculator import SETTLED, Speculator


class Timed:
    """A speculator that hears of plain waves and of waves with drafts."""

    def __init__(self) -> None:
        info = EngineInfo("fake", 64, 8, 1, 4, 4, 8, 16, 2, 64, 1, False)
        clock = iter(range(10**6)).__next__
        self.one = Speculator(
            SpecPolicy(), info, WaveCost(50.0, 250.0, 64), Metrics(), lambda: float(clock())
        )
        self.wave = 0

    def see(self, ms: float, columns: int = 1) -> None:
        self.wave += 1
        ns = int(1e6 * ms)
        self.one.wave(Done(self.wave, [], 0, 0, ns, 0), ns, 1, columns, True)

    @property
    def pause(self) -> int:
        """Waves for which nothing is drafted."""
        return self.one._allowance.waves(1, self.wave + 1)


@pytest.mark.parametrize(("slow", "lost"), [(10.0, 0.0), (25.0, 1.5), (900.0, CLIP - 1.0)])
def test_drafts_pay_for_the_waves_behind_them(slow: float, lost: float) -> None:
    """Those take longer, since caches hold other things; a wave that was held up says little."""
    timed = Timed()
    for _ in range(SETTLED + PROBE):
        timed.see(10.0)
    assert not timed.pause
    drafted = int(FIRST / (2 * lost)) + 1 if lost else 3
    for _ in range(drafted):
        timed.see(10.0, columns=4)
        for _ in range(2):
            timed.see(slow)
        timed.see(10.0)
    left = FIRST + PART * timed.wave - 2 * lost * drafted
    assert (timed.pause > 0) == (left < 0.0)
    assert bool(lost) == (left < 0.0)


def test_keys_that_were_left_say_nothing_of_what_drafts_cost() -> None:
    """The first MTP drafts after long have them made; those behind them do not."""
    costs = WaveCosts()
    drafters = [Drafter(None, Averages(DEPTH_PRIOR), Patience(), 15) for _ in range(2)]

    def took(wave: int, ms: float, *drafting: Drafter) -> None:
        done = Done(wave, [], 0, 0, 0, int(1e6 * ms))
        result = RowDone(1, (7,), 0, drafts=(8, 9))
        drafts_took(costs, done, [(drafter, 0, 2, result) for drafter in drafting])

    one, other = drafters
    took(1, 90.0, one)
    for wave in range(2, 8):
        took(wave, 0.6, one)
    assert costs.draft_ms(1, 10.0) == pytest.approx(0.3)
    took(8, 90.0, one, other)  # the second one only begins
    took(9, 0.8, one, other)
    assert costs.draft_ms(2, 10.0) == pytest.approx(0.4)
    took(9 + BEHIND, 0.8, one, other)
    for wave in range(100, 1000, BEHIND + 1):
        took(wave, 90.0, one)
    assert costs.draft_ms(1, 10.0) == pytest.approx(0.3)
    took(1000, 0.6, one)
    assert costs.draft_ms(1, 10.0) == pytest.approx(0.3)
