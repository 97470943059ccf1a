"""Ladder: the watchdog of one sequence's drafts, which steps down and never up; and their counts.

Whatever the plan expects, rounds whose drafts keep failing shorten the chains of the sequence, and
in the end it decodes plainly; a round that failed in the engine ends its drafts at once. The next
request starts at the top."""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP = 0.75  # weight of the past in the average of accepted drafts
LOW = 0.3  # accepted drafts per round below which the ladder is stepped down
ROUNDS = 12  # that the average is given, after each step


class Ladder:
    """depth: most drafts per round, 0 for plain decode. events: (round, new depth, why)."""

    __slots__ = ("_average", "_since", "depth", "events", "rounds")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.events: list[tuple[int, int, str]] = []
        self.rounds = 0
        self._average = 1.0
        self._since = 0

    def round(self, accepted: int) -> bool:
        """A round of drafts was verified; True if it stepped down."""
        self.rounds += 1
        self._since += 1
        self._average += (1 - KEEP) * (accepted - self._average)
        if self._since < ROUNDS or self._average >= LOW or not self.depth:
            return False
        self._step((self.depth + 1) // 3 if self.depth > 1 else 0, "low acceptance")
        return True

    def failed(self, why: str) -> bool:
        """The engine could not draft; True if that changes anything."""
        if self.depth:
            self._step(0, why)
            return True
        return False

    def _step(self, depth: int, why: str) -> None:
        self.depth = depth
        self.events.append((self.rounds, depth, why))
        self._since = 0
        self._average = 1.0


@dataclass(slots=True)
class DraftStats:
    """Of one sequence: drafts verified and accepted, by kind, and the steps of its ladder."""

    ngram: int = 0
    ngram_accepted: int = 0
    mtp: int = 0
    mtp_accepted: int = 0
    events: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        return self.ngram + self.mtp

    @property
    def accepted(self) -> int:
        return self.ngram_accepted + self.mtp_accepted
