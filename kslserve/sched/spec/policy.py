"""What may be drafted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecPolicy:
    """ngram, mtp: which drafters. depth: most MTP drafts of a round; lanes: most drafts of a round
    in all. always: draft as much as that allows, whatever it costs and however rarely it comes true
    (tests and benches). oracle: probability that a draft is right, for jobs whose output is forced
    (the same)."""

    ngram: bool = True
    mtp: bool = True
    depth: int = 7
    lanes: int = 15
    always: bool = False
    oracle: float | None = None
