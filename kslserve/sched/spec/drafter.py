"""Drafter: the drafts of one sequence.

It knows what the sequence has sampled, what its slot holds as MTP drafts, and how often each kind
came true; it offers a chain of drafts for the next wave and learns from what the wave sampled."""

from __future__ import annotations

import numpy as np

from kslserve.engine.types import DRAFT_MAX, RowDone
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.acceptance import (
    DEPTH_CLASSES,
    LEAST,
    MATCHES,
    Averages,
    chain_survival,
    match_class,
    suffix_survival,
)
from kslserve.sched.spec.index import SuffixIndex
from kslserve.sched.spec.ladder import DraftStats, Ladder
from kslserve.sched.spec.patience import Account, Patience, Trial

STRONG = 0.8  # chance of what the index predicts that makes MTP drafts superfluous
CATCH_UP = 1 + DRAFT_MAX  # more tokens than a wave samples say nothing of predictions
DEEPER_EVERY = 16  # rounds after which a chain is tried one draft deeper
ASLEEP_MAX = 64  # most waves between two looks
# A sequence that verified drafts sleeps a few waves for NEAR looks in vain, then twice as long each
# time; others by far more, from the first time on.
NEAR, NEAR_MAX, FAR = 6, 4, 8
TOGETHER = 4  # times at which sequences wake, in the longest of their sleeps
STANDS = 8  # waves for which a choice stands while all that it drafts comes true
AGAIN = 32  # waves after which a chain that did not pay is weighed again
MADE_RATE = 1 / 8  # weight of one round in the part of rounds that gave a draft


class Drafter:
    """index: None until it is looked at first, or without n-gram drafts. chain: averages of
    MTP drafts, None without them. held: MTP drafts for the next positions. survival: the offered
    chain; own: how many at its beginning are MTP's. lanes: those of it that the next row verifies;
    propose: MTP drafts to make after it; proposed: the last wave that made some. stands: waves in
    which the same number may be verified without choosing. asleep_until: the wave at which it is
    looked at again, since nothing was worth drafting and looking costs time."""

    __slots__ = (
        "_account", "_deeper", "_made", "_most", "_offered", "_patience", "_trial", "_vain",
        "_wait_until", "asleep_until", "chain", "held", "index", "ladder", "lanes", "matches",
        "own", "propose", "proposed", "stands", "stats", "survival",
    )  # fmt: skip

    def __init__(
        self, matches: Averages | None, chain: Averages | None, patience: Patience, lanes: int
    ) -> None:
        self.matches = matches.child() if matches is not None else None
        self.chain = chain.child() if chain is not None else None
        self.ladder = Ladder(lanes)
        self.stats = DraftStats(events=self.ladder.events)
        self.index: SuffixIndex | None = None
        self.held: list[int] = []
        self.survival: list[float] = []
        self.own = 0
        self.lanes: list[int] = []
        self.propose = self.stands = 0
        self.proposed = -CATCH_UP  # so none is near enough
        self._most = 0  # lanes that it was asked for
        self._patience = patience
        self._account = Account(patience)
        self._trial = Trial()
        self._made = 1.0  # how many of the wanted chains were not cut off at once
        self._offered: list[int] = []  # the chain, where it begins with MTP's drafts
        self._deeper = 0
        self._vain = 0  # looks since it drafted
        self._wait_until = 0
        self.asleep_until = 0

    @property
    def live(self) -> bool:
        """It may draft again."""
        return self.ladder.depth > 0

    @property
    def engaged(self) -> bool:
        """What the next wave samples tells something of its drafts."""
        return bool(self.lanes or self.held or self.propose)

    # ------------------------------------------------------------ before a wave

    def read(self, sequence: Sequence) -> None:
        """Take in what the sequence sampled since the last time."""
        matches, index = self.matches, self.index
        if matches is None:
            return
        prompt = sequence.job.prompt_ids
        if index is None:
            ids = np.concatenate([prompt, np.array(sequence.output, np.int32)])
            self.index = SuffixIndex(ids)
            return
        new = sequence.output[len(index) - len(prompt) :]
        if not new:
            return
        at, length = index.at, index.length
        hits = index.extend(new)
        if not at or len(new) > CATCH_UP:
            return
        if length >= MATCHES[-1]:
            matches.note_hits(match_class(length), hits)
        else:
            for longer in range(length, length + hits):
                matches.note(match_class(longer), True)
        if hits < len(new):
            matches.note(match_class(length + hits), False)

    def promises(self, least: float, least_own: float, wave: int) -> bool:
        """Whether it is worth while to weigh its drafts: MTP's are at hand, or are to be made to
        see what they are worth, or the first one that the index predicts, or MTP would make, comes
        true with at least that probability."""
        if self.held:
            return True
        index, matches, chain = self.index, self.matches, self.chain
        if (
            index is not None
            and matches is not None
            and index.at
            and matches.values[match_class(index.length)] >= least
        ):
            return True
        if chain is None:
            return False
        if self._trial.running or wave >= self._patience.trial_at:
            return least_own < 1.0
        return wave >= self._wait_until and self._made * chain.values[0] >= least_own

    def wait(self, wave: int) -> None:
        """MTP drafts did not pay in this wave: they are not weighed again at once."""
        self._wait_until = wave + AGAIN

    def offer(self, most: int, least: float = LEAST) -> None:
        """Set the best chain of at most `most` drafts: what MTP drafted and what the index adds to
        it, or the index alone. least: probability below which nothing is offered."""
        self.survival, self.own = [], 0
        most = self._most = min(most, self.ladder.depth)
        if most <= 0:
            return
        index, matches, chain = self.index, self.matches, self.chain
        copied: list[float] = []
        if index is not None and matches is not None and index.at:
            copied = suffix_survival(matches, index.length, most, least)
        if self.held and chain is not None:
            self._offer_own(chain, most, least)
            if sum(copied) <= sum(self.survival):
                return
        self.survival, self.own = copied, 0

    def _offer_own(self, chain: Averages, most: int, least: float) -> None:
        survival = chain_survival(chain, min(len(self.held), most), least)
        held = self.held[: len(survival)]
        index, matches = self.index, self.matches
        more: list[int] = []
        if held and len(held) < most and index is not None and matches is not None:
            more, length = index.draft_after(held, most - len(held))
            if more:
                survival += suffix_survival(matches, length, len(more), least, survival[-1])
        self.survival = survival
        self._offered = (held + more)[: len(survival)]
        self.own = len(held)

    def chances(self, most: int) -> list[float]:
        """How likely MTP drafts made after the next wave are to come true, at most `most`."""
        most = min(most, self.ladder.depth)
        if self.chain is None or most <= 0:
            return []
        index, matches = self.index, self.matches
        if (
            index is not None
            and matches is not None
            and index.at
            and matches.values[match_class(index.length)] >= STRONG
        ):
            return []
        return [self._made * chance for chance in chain_survival(self.chain, most)]

    def aim(self, lanes: int, depth: int, most: int, wave: int) -> None:
        """Verify so many of the offered drafts in this wave, then make `depth` MTP drafts; at times
        more, at most `most`, to see whether that would pay."""
        if not lanes:
            self.lanes, self.own = [], 0
        elif self.own:
            self.lanes, self.own = self._offered[:lanes], min(self.own, lanes)
        else:
            assert self.index is not None
            self.lanes = self.index.draft(lanes)
        most = max(0, min(most, self.ladder.depth))
        self.propose = depth = min(depth, most)
        if lanes and lanes == self._most and not (self.own or depth) and self._sure:
            self.stands = STANDS
        trial = self._trial
        if depth:
            trial.end()
            self._deeper += 1
            if self._deeper % DEEPER_EVERY == 0 and depth < most:
                self.propose = depth + 1
            return
        self.wait(wave)
        if self.chain is None or not most or self.lanes:
            return  # beside drafts that are verified, nothing tells what one was worth
        if not trial.running and wave >= self._patience.trial_at:
            self._patience.tried(wave)
            trial.begin()
        if trial.running:
            trial.drafting()
            self.propose = 1

    @property
    def _sure(self) -> bool:
        """The index is as sure of what it predicts as it can be."""
        return self.index is not None and self.index.length >= MATCHES[-1]

    def again(self, most: int) -> bool:
        """Verify as many drafts of the index as in the wave before, where those were all that a row
        can have and came true: nothing else would be chosen. False where that may not be so."""
        if not (self.stands and self._sure):
            return False
        assert self.index is not None
        self.stands -= 1
        self.lanes = self.index.draft(min(self._most, most))
        return bool(self.lanes)

    def settle(self, saved: float, wave: int) -> None:
        """A wave with drafts of it saved so much, in waves without drafts. Whatever was expected:
        when they have cost too much, there are none for a while."""
        pause = self._account.settle(saved)
        if pause:
            self.asleep_until = wave + pause
            self.held = []
            self.stands = 0

    def doze(self, wave: int, pace: int) -> None:
        """It was looked at before this wave: without drafts, sleep for longer and longer, up to
        `pace` waves. Those that sleep for long wake together, since looks at several cost little
        more than one."""
        if self.lanes or self.propose or self.held:
            self._vain = 0
            return
        looks, grid = self._vain, max(pace // TOGETHER, 1)
        if self.ladder.rounds:
            waves = min(1 << looks, NEAR_MAX) if looks < NEAR else NEAR_MAX << looks - NEAR
            grid = min(grid, waves)
        else:
            waves = FAR ** (looks + 1)
        until = wave + 1 + min(waves, pace)
        self.asleep_until = -(-until // grid) * grid
        self._vain = min(looks + 1, 2 * NEAR)

    def fit(self, room: int, samples: bool) -> None:
        """There are blocks for so many positions beyond those of the plain row, which samples or
        does not."""
        self.lanes = self.lanes[:room]
        self.own = min(self.own, len(self.lanes))
        self.propose = min(self.propose, room - len(self.lanes)) if samples else 0

    def rest(self) -> None:
        """The next row has no drafts and makes none."""
        self.lanes = []
        self.propose = self.stands = 0

    # ------------------------------------------------------------ after a wave

    def learn(self, result: RowDone) -> bool:
        """What became of the drafts of a row; True if the ladder stepped down."""
        tokens, lanes = result.tokens, self.lanes
        stats, stepped = self.stats, False
        if lanes:
            own = self.own
            accepted = result.accepted
            if accepted < len(lanes):
                self.stands = 0
            stats.mtp += own
            stats.ngram += len(lanes) - own
            stats.mtp_accepted += min(accepted, own)
            stats.ngram_accepted += max(0, accepted - own)
            self._note_chain(lanes[:own], tokens)
            self.held = []
            stepped = self.ladder.round(accepted)
        elif self.held:
            # Drafts that were not verified show all the same what they would have been worth.
            self._trial.note(self.held[0] == tokens[0])
            held = self._note_chain(self.held, tokens)
            self.held = held if self.live else []
        if self.propose and not (result.stop or result.latched):
            self._made += MADE_RATE * (bool(result.drafts) - self._made)
        if result.drafts:
            self.held = list(result.drafts)
        if result.bad_draft and self.ladder.failed("the draft head failed"):
            stepped = True
        if not self.live:
            self.index, self.held = None, []
        return stepped

    def _note_chain(self, drafts: list[int], tokens: tuple[int, ...]) -> list[int]:
        """Compare drafts with what was sampled; those that are left after it, if all agree."""
        if self.chain is not None:
            for i, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
                self.chain.note(min(i, DEPTH_CLASSES - 1), draft == token)
                if draft != token:
                    return []
        return drafts[len(tokens) :]
