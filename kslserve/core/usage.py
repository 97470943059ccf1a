"""Token counts and the reason a generation ended."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.Enum):
    """Why a generation ended, before a dialect gives it a name."""

    STOP = "stop"  # the model ended its turn
    STOP_STRING = "stop_string"
    LENGTH = "length"  # the output limit
    WINDOW = "window"  # the context is full
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Statistics:
    """What requests that ask for it are told beside the counts. Seconds from the admission to the
    first token, and from there to the end; prompt tokens from a checkpoint and computed ones; waves
    that sampled (rounds); drafts verified and accepted, by who made them; and when and why less was
    drafted from then on (a round counts drafts here)."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    rounds: int = 0
    drafted: dict[str, int] = field(default_factory=lambda: {"ngram": 0, "mtp": 0})
    accepted: dict[str, int] = field(default_factory=lambda: {"ngram": 0, "mtp": 0})
    ladder: list[dict[str, int | str]] = field(default_factory=list)

    def add(self, other: Statistics) -> None:
        """Those of another sequence of the same request."""
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.cached_tokens += other.cached_tokens
        self.prefilled_tokens += other.prefilled_tokens
        self.rounds += other.rounds
        for kind, count in other.drafted.items():
            self.drafted[kind] += count
            self.accepted[kind] += other.accepted[kind]
        self.ladder += other.ladder

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        values = dataclasses.asdict(self)
        return {
            **values,
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
        }


@dataclass(slots=True)
class Usage:
    """Counts of one request. prompt_tokens includes cached_tokens, which came from a checkpoint,
    and cache_write_tokens, which were computed and can be had from one from now on (known at the
    end); completion_tokens includes reasoning_tokens and end tokens. statistics: where they were
    asked for, complete at the end."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    statistics: Statistics | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
