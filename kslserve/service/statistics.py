"""What one sequence took, for clients that ask."""

from __future__ import annotations

from typing import Protocol

from kslserve.core.usage import Statistics
from kslserve.sched.sequence import Sequence


class Times(Protocol):
    """When it happened, on one clock, or None."""

    @property
    def admitted_at(self) -> float | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def ended_at(self) -> float | None: ...


def statistics_of(sequence: Sequence, times: Times) -> Statistics:
    """At the end of its generation."""
    found = Statistics(
        prefill_s=_between(times.admitted_at, times.first_token_at),
        decode_s=_between(times.first_token_at, times.ended_at),
        cached_tokens=sequence.cached_tokens,
        prefilled_tokens=max(
            0, min(sequence.computed, sequence.prompt_tokens) - sequence.cached_tokens
        ),
        rounds=sequence.rounds,
    )
    if sequence.drafter is not None:
        drafts = sequence.drafter.stats
        found.drafted = {"ngram": drafts.ngram, "mtp": drafts.mtp}
        found.accepted = {"ngram": drafts.ngram_accepted, "mtp": drafts.mtp_accepted}
        found.ladder = [
            {"round": number, "depth": depth, "why": why} for number, depth, why in drafts.events
        ]
    return found


def _between(begun: float | None, ended: float | None) -> float:
    return ended - begun if begun is not None and ended is not None else 0.0
