"""Patience: when drafts are tried again that did not pay, for one sequence and among all of them.

MTP drafts cost a part of a wave even where nobody verifies them. So while the plan wants none, one
sequence at a time makes a trial: a draft beside each of some tokens, which the next token proves
right or wrong. A trial that does not make the plan want drafts doubles the waves to the next one.
And an account of what drafts cost and saved, whatever was expected, suspends those that lose."""

from __future__ import annotations

TRIAL_FIRST, TRIAL_LAST = 32, 4096  # waves from one trial to the next
TRIAL_ROUNDS = 6  # drafts of a trial
TRIAL_MISSES = 2  # wrong ones that end it
STAKE = 6.0  # plain waves that drafts may cost, or have to save, before that has consequences
CREDIT = 12.0  # most of what drafts have saved that counts later
ROUND = 4.0  # most of what one round cost that counts: that a good bet was lost once says little
PAUSE_FIRST, PAUSE_LAST = 16, 2048  # waves


class Patience:
    """What sequences teach each other: where drafts do not pay in one of them they hardly will in
    the next one. trial_at: the wave from which a trial is due. pause: waves without drafts after
    some that cost more than they gained."""

    __slots__ = ("_every", "pause", "trial_at")

    def __init__(self) -> None:
        self._every = TRIAL_FIRST
        self.trial_at = 0
        self.pause = PAUSE_FIRST

    def lost(self) -> None:
        self.pause = min(2 * self.pause, PAUSE_LAST)

    def gained(self) -> None:
        self.pause = max(self.pause // 2, PAUSE_FIRST)
        self._every = TRIAL_FIRST

    def tried(self, wave: int) -> None:
        """A trial began."""
        self.trial_at = wave + self._every
        self._every = min(2 * self._every, TRIAL_LAST)


class Trial:
    """That of one sequence. running: it is due to make a draft."""

    __slots__ = ("_left", "_misses")

    def __init__(self) -> None:
        self._left = self._misses = 0

    @property
    def running(self) -> bool:
        return self._left > 0

    def begin(self) -> None:
        self._left, self._misses = TRIAL_ROUNDS, 0

    def end(self) -> None:
        self._left = 0

    def drafting(self) -> None:
        self._left -= 1

    def note(self, hit: bool) -> None:
        self._misses += not hit
        if self._misses >= TRIAL_MISSES:
            self._left = 0


class Account:
    """What the drafts of one sequence saved, in waves without drafts, where that is negative what
    they cost."""

    __slots__ = ("_patience", "_saved")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._saved = 0.0

    def settle(self, saved: float) -> int:
        """A wave with drafts saved so much; how many waves to draft nothing in, mostly 0."""
        self._saved += max(saved, -ROUND)
        if self._saved < -STAKE:
            self._saved = 0.0
            self._patience.lost()
            return self._patience.pause
        if self._saved > STAKE:
            self._saved = min(self._saved, CREDIT)
            self._patience.gained()
        return 0
