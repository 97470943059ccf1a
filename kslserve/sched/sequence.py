"""Sequence: one token timeline being computed for a request.

The timeline is prompt + output. `known` tokens exist, `computed` positions are in the engine's
state; every plan moves computed toward known, so a prompt chunk, a decode step, the rest after an
adopted checkpoint and the way back of a preempted sequence are the same arithmetic:

    0 <= computed <= known == prompt + output,   computed == known - 1 while the next row decodes
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np

from kslserve.core.usage import FinishReason
from kslserve.engine.types import Draft, Ids, Row, RowKind
from kslserve.errors import KslError
from kslserve.sched.job import Job, Sink

if TYPE_CHECKING:
    from kslserve.sched.cache.checkpoint import Checkpoint
    from kslserve.sched.cache.index import Node
    from kslserve.sched.cache.moves import Transfer
    from kslserve.sched.cache.saves import SavePoint
    from kslserve.sched.spec.drafter import Drafter


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Mutable record owned by the scheduler; callers read ids and counts only.

    number orders arrivals; arrived, queued (last) and admitted are clock times. limit: most output
    tokens; limit_reason: what reaching it is called. output: every sampled id. ids: what was known
    when it was admitted, the prompt at first; decoding begins behind them. mark: why it must end as
    soon as no row of it is in flight. in_flight: rows of it that are. last_wave: newest wave that
    touches its memory. fresh: it holds memory, and no wave has carried its set-up yet. overtaken:
    later arrivals that were admitted first; preempted: times that it gave way.

    blocks: of its positions so far; `reserved` more are promised to it; the engine's table has the
    first `tabled`. room: positions that the blocks hold. adopted: the checkpoint that it starts
    from, until a wave has copied it; load: or how it is copied from host memory, wave by wave,
    before its first row. cached_tokens: prompt positions that came from a checkpoint. saves:
    positions of its prompt that get one. kept: end of the last new checkpoint of its state. path:
    its prompt in the index of prefixes. scored: prompt positions whose scores were told. masked:
    version of its guide's mask that the engine has. drafter: what it drafts, None for nothing.
    rounds: waves that sampled for it. row: its part of every wave; in decode only its start and the
    id in `fed`, its tokens, change.
    """

    __slots__ = (
        "admitted",
        "adopted",
        "arrived",
        "blocks",
        "cached_tokens",
        "computed",
        "drafter",
        "fed",
        "fresh",
        "ids",
        "in_flight",
        "job",
        "kept",
        "last_wave",
        "limit",
        "limit_reason",
        "load",
        "mark",
        "masked",
        "number",
        "output",
        "overtaken",
        "path",
        "preempted",
        "prompt_tokens",
        "queued",
        "reserved",
        "room",
        "rounds",
        "row",
        "saves",
        "scored",
        "sink",
        "slab",
        "slot",
        "state",
        "tabled",
        "told",
    )  # fmt: skip

    def __init__(self, number: int, job: Job, sink: Sink, arrived: float) -> None:
        self.number = number
        self.job = job
        self.sink = sink
        self.state = State.QUEUED
        self.arrived = self.queued = arrived
        self.admitted = 0.0
        self.prompt_tokens = len(job.prompt_ids)
        self.output: list[int] = []
        self.ids = job.prompt_ids
        self.computed = 0
        self.limit = job.max_new_tokens
        self.limit_reason = FinishReason.LENGTH
        self.slot = -1
        self.slab = -1
        self.blocks: list[int] = []
        self.reserved = 0
        self.rounds = 0
        self.tabled = 0
        self.room = 0
        self.last_wave = 0
        self.in_flight = 0
        self.fresh = False
        self.told = False  # the sink has heard of its admission
        self.mark: tuple[FinishReason, KslError | None] | None = None
        self.overtaken = 0
        self.preempted = 0
        self.cached_tokens = 0
        self.adopted: Checkpoint | None = None
        self.load: Transfer | None = None
        self.saves: list[SavePoint] = []
        self.kept = 0
        self.scored = 0
        self.masked = 0
        self.path: Node | None = None
        self.drafter: Drafter | None = None
        self.fed = [0]
        self.row = Row(RowKind.PREFILL, -1, -1, 0, 1, [])

    @property
    def output_tokens(self) -> int:
        return len(self.output)

    @property
    def written_tokens(self) -> int:
        """Tokens of its prompt that came from no checkpoint and can be had from one now."""
        return max(min(self.kept, self.prompt_tokens) - self.cached_tokens, 0)

    @property
    def known(self) -> int:
        return self.prompt_tokens + len(self.output)

    @property
    def prompt_left(self) -> int:
        """Positions to compute before it decodes; 0 from the first decode row on."""
        return max(len(self.ids) - self.computed, 0)

    def computed_ids(self) -> Ids:
        """The tokens of all computed positions."""
        prompt = self.job.prompt_ids
        if self.computed <= self.prompt_tokens:
            return prompt[: self.computed]
        output = np.array(self.output[: self.computed - self.prompt_tokens], dtype=np.int32)
        return np.concatenate([prompt, output])

    def start_over(self, now: float) -> None:
        """It gave way, holds nothing any more and will be admitted again with what is known now."""
        if self.output:
            output = np.array(self.output, dtype=np.int32)
            self.ids = np.concatenate([self.job.prompt_ids, output])
        self.state = State.QUEUED
        self.queued = now
        self.computed = 0
        self.preempted += 1
        self.masked = 0
        self.saves = []

    def row_limit(self, n: int) -> int:
        """Positions of the next prompt row, of the n that it may have: scored ones and others do
        not share a row."""
        last = self.prompt_tokens - 1
        if not self.job.score or self.computed >= last:
            return n
        edge = self.scored if self.computed < self.scored else last
        return min(n, edge - self.computed)

    def aim_prompt(self, n: int, cuts: tuple[tuple[int, int], ...] = ()) -> None:
        """Make the row the next n positions of `ids`, n within `row_limit`; it samples when they
        are the last ones. cuts: (offset, slab) where the state is copied on the way."""
        row = self.row
        end = self.computed + n
        if end == len(self.ids):
            row.kind = RowKind.LAST
            row.top_n = self.job.sampling.logprobs
        elif self.job.score and self.scored <= self.computed < self.prompt_tokens - 1:
            row.kind = RowKind.SCORE
            row.top_n = self.job.sampling.logprobs
        else:
            row.kind = RowKind.PREFILL
            row.top_n = None
        row.start = self.computed
        row.n = n
        row.tokens = self.ids[self.computed : end + (row.kind is RowKind.SCORE)]
        row.draft = Draft.NONE
        row.propose = 0
        row.cuts = cuts

    @property
    def held_up(self) -> bool:
        """Its mask is not made yet."""
        guide = self.job.guide
        return guide is not None and not guide.ready

    def append(self, ids: Items[int]) -> None:
        """Ids that follow the output without being sampled: they are computed like a prompt."""
        self.output += ids
        output = np.array(self.output, dtype=np.int32)
        self.ids = np.concatenate([self.job.prompt_ids, output])

    def aim_decode(self, token: int) -> None:
        """Make the row feed the last sampled token and sample the next."""
        row = self.row
        row.start = self.computed
        self.fed[0] = token
        if row.tokens is self.fed and not row.propose:
            return  # it was such a row before
        row.kind = RowKind.LAST
        row.n = 1
        row.tokens = self.fed
        row.draft = Draft.NONE
        row.propose = 0
        row.cuts = ()

    def aim_drafts(self, drafts: list[int], propose: int) -> None:
        """Make the row that was aimed at the last sampled token verify drafts behind it, and have
        `propose` MTP drafts made after it."""
        row = self.row
        if drafts:
            row.kind = RowKind.VERIFY
            row.n = 1 + len(drafts)
            row.tokens = [self.fed[0], *drafts]
            row.draft = Draft.GIVEN
        else:
            row.kind = RowKind.LAST
            row.n = 1
            row.tokens = self.fed
            row.draft = Draft.NONE
        row.propose = propose

    def aim_ahead(self) -> None:
        """Make the row the one after the decode row in flight, whose token only the engine has."""
        row = self.row
        row.start = self.computed + 1
        self.fed[0] = -1

    def describe(self) -> dict[str, Any]:
        """Fields for a log line."""
        return {
            "sequence": self.number,
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "computed": self.computed,
            "cached": self.cached_tokens,
            "state": self.state.value,
        }
