"""Sequence: one token timeline being computed for a request.

The timeline is prompt + output. `known` tokens exist, `computed` positions are in the engine's
state; every plan moves computed toward known, so a prompt chunk and a decode step are the same
arithmetic:

    0 <= computed <= known == prompt + output,   computed == known - 1 while the next row decodes
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Row, RowKind
from kslserve.errors import KslError

Ids = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Job:
    """What to generate. prompt_ids: int32 [n], n >= 1. max_new_tokens >= 1. priority: lower runs
    first; side: a short request beside the main work, first among equals. forced: int32 ids that
    the engine must sample (engines opened with test hooks only)."""

    prompt_ids: Ids
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    side: bool = False
    forced: Ids | None = None


class Sink(Protocol):
    """Hears of one sequence, on the event loop, after the next wave was submitted. Never called
    from inside `submit` or `cancel`. A method that raises ends the sequence."""

    def admitted(self) -> None:
        """The sequence holds its memory and runs."""

    def tokens(self, ids: list[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        """Sampled ids of one wave, a stop id included. logprobs: per id [(id, logprob), top...]."""

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        """Nothing follows. Exactly once. error: set when it failed (reason is then CANCELLED)."""


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Mutable record owned by the scheduler; callers read ids and counts only.

    number orders arrivals; arrived and admitted are clock times. limit: most output tokens;
    limit_reason: what reaching it is called. mark: why it must end as soon as no row of it is in
    flight. last_wave: newest wave that touches its memory. fresh: it holds memory, and no wave has
    carried its set-up yet. overtaken: later arrivals that were admitted first.
    """

    __slots__ = (
        "_next",
        "admitted",
        "arrived",
        "blocks",
        "computed",
        "fresh",
        "in_flight",
        "job",
        "last_wave",
        "limit",
        "limit_reason",
        "mark",
        "number",
        "output_tokens",
        "overtaken",
        "prompt_tokens",
        "row",
        "sink",
        "slab",
        "slot",
        "state",
    )  # fmt: skip

    def __init__(self, number: int, job: Job, sink: Sink, arrived: float) -> None:
        self.number = number
        self.job = job
        self.sink = sink
        self.state = State.QUEUED
        self.arrived = arrived
        self.admitted = 0.0
        self.prompt_tokens = len(job.prompt_ids)
        self.output_tokens = 0
        self.computed = 0
        self.limit = job.max_new_tokens
        self.limit_reason = FinishReason.LENGTH
        self.slot = -1
        self.slab = -1
        self.blocks: list[int] = []
        self.last_wave = 0
        self.in_flight = False
        self.fresh = False
        self.mark: tuple[FinishReason, KslError | None] | None = None
        self.overtaken = 0
        # One row for every wave: in decode only its start and its token change.
        self._next = [0]
        self.row = Row(RowKind.PREFILL, -1, -1, 0, 1, self._next)

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt positions that are not computed yet; 0 from the first decode row on."""
        return max(self.prompt_tokens - self.computed, 0)

    def aim_prompt(self, n: int) -> None:
        """Make the row the next n prompt positions; it samples when they are the last ones."""
        row = self.row
        end = self.computed + n
        if end == self.prompt_tokens:
            row.kind = RowKind.LAST
            row.top_n = self.job.sampling.logprobs
        row.start = self.computed
        row.n = n
        row.tokens = self.job.prompt_ids[self.computed : end]

    def aim_decode(self, token: int) -> None:
        """Make the row feed the last sampled token and sample the next."""
        row = self.row
        row.start = self.computed
        row.n = 1
        self._next[0] = token
        row.tokens = self._next

    def describe(self) -> dict[str, Any]:
        """Fields for a log line."""
        return {
            "sequence": self.number,
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "computed": self.computed,
            "state": self.state.value,
        }
