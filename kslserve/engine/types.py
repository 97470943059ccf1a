"""What the scheduler says to an engine and hears back. Mirrors native/include/ksl.h, whose comments
are the contract; here are only shapes. Values that change every wave are plain mutable classes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kslserve.core.sampling import SamplingParams
from kslserve.engine.equality import EQUAL, Equality

Ids = npt.NDArray[np.int32]

DRAFT_MAX = 16
CUTS_MAX = 4


class RowKind(enum.IntEnum):
    PREFILL = 0
    LAST = 1
    VERIFY = 2
    SCORE = 3


class Draft(enum.IntEnum):
    NONE = 0
    GIVEN = 1
    OWN = 2


class OpKind(enum.IntEnum):
    ZERO_SLAB = 0
    COPY_SLAB = 1
    COPY_BLOCK = 2
    SAVE_SLAB = 3
    LOAD_SLAB = 4
    SAVE_BLOCK = 5
    LOAD_BLOCK = 6
    CONFIGURE = 7
    MASK = 8
    FORCE = 9
    DROP_SLABS = 10
    DROP_BLOCKS = 11
    TOUCH_SLABS = 12
    TOUCH_BLOCKS = 13
    FAULT = 14


# Ops on `b` slabs or blocks from `a` on.
SPANS = frozenset((OpKind.DROP_SLABS, OpKind.DROP_BLOCKS, OpKind.TOUCH_SLABS, OpKind.TOUCH_BLOCKS))


@dataclass(slots=True)
class SlotConfig:
    """Data of CONFIGURE. seed: uint64. prompt_ids and output_ids feed the penalties."""

    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    prompt_ids: Ids | None = None
    output_ids: Ids | None = None


@dataclass(slots=True)
class StateOp:
    """b: a second index, how many there are from `a` on (SPANS), or where in the image `data`
    begins (SAVE_*, LOAD_*). data: SlotConfig (CONFIGURE), uint32 array or None (MASK), int32 array
    (FORCE), a writable uint8 array of a slab's or block's bytes or a part of them (SAVE_*, LOAD_*),
    else None."""

    kind: OpKind
    a: int
    b: int = 0
    data: Any = None


@dataclass(slots=True)
class TableEdit:
    """table[slot][start:start+len(ids)] = ids"""

    slot: int
    start: int
    ids: Sequence[int]


@dataclass(slots=True)
class Row:
    """Positions [start, start+n) of one sequence. tokens: n ids (SCORE: n + 1); an id of -1 in
    first place is the one the slot sampled last. top_n: None for no log-probabilities."""

    kind: RowKind
    slot: int
    slab: int
    start: int
    n: int
    tokens: Ids | Sequence[int]
    draft: Draft = Draft.NONE
    propose: int = 0
    cuts: tuple[tuple[int, int], ...] = ()
    top_n: int | None = None


@dataclass(slots=True)
class Wave:
    """One submitted batch. id: increasing from 1. taps: names to copy out (Done.taps). same_rows:
    `rows` is the list of the wave before, and of its rows only `start` and the ids in `tokens`
    changed; a hint that saves an engine time."""

    id: int
    rows: list[Row] = field(default_factory=list)
    before: list[StateOp] = field(default_factory=list)
    after: list[StateOp] = field(default_factory=list)
    edits: list[TableEdit] = field(default_factory=list)
    taps: tuple[str, ...] = ()
    same_rows: bool = False


@dataclass(slots=True)
class RowDone:
    """Result of one row. logprobs: per sampled (or scored) position [(id, logprob), top...], when
    asked for. drafts: the MTP drafts that the slot now holds. bad_draft: the draft head failed."""

    slot: int
    tokens: tuple[int, ...]
    position: int
    accepted: int = 0
    drafts: tuple[int, ...] = ()
    stop: bool = False
    latched: bool = False
    bad_logits: bool = False
    bad_draft: bool = False
    logprobs: list[list[tuple[int, float]]] | None = None


class Done:
    """Result of one wave. rows: in row order; made when first asked for where they are given as a
    function. sampled: a short form of rows that each sampled one token and of which there is
    nothing else to tell, these tokens in row order; or None. error: text of a fatal failure (rows
    is then empty). Times are CLOCK_MONOTONIC nanoseconds; drafts_ns: of ended - started, what MTP
    drafting took."""

    __slots__ = (
        "_rows", "drafts_ns", "ended_ns", "error", "queued_ns", "sampled", "started_ns", "taps",
        "wave",
    )  # fmt: skip

    def __init__(
        self,
        wave: int,
        rows: list[RowDone] | Callable[[], list[RowDone]],
        queued_ns: int = 0,
        started_ns: int = 0,
        ended_ns: int = 0,
        drafts_ns: int = 0,
        sampled: list[int] | None = None,
    ) -> None:
        self.wave = wave
        self._rows = rows
        self.queued_ns = queued_ns
        self.started_ns = started_ns
        self.ended_ns = ended_ns
        self.drafts_ns = drafts_ns
        self.sampled = sampled
        self.error: str | None = None
        self.taps: dict[str, npt.NDArray[np.float32]] = {}

    @property
    def rows(self) -> list[RowDone]:
        rows = self._rows
        if not isinstance(rows, list):
            rows = self._rows = rows()
        return rows


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of an open engine. Sizes in bytes; note: a sentence for whoever starts it, or
    empty."""

    name: str
    vocab: int
    hidden: int
    layers: int
    slots: int
    slabs: int
    blocks: int
    block_tokens: int
    blocks_per_slot: int
    wave_columns: int
    ring_depth: int
    has_mtp: bool
    threads: int = 1
    isa: str = ""
    activation: str = "float"
    note: str = ""
    equality: Equality = EQUAL
    numerics: str = ""
    kv_format: str = "f32"
    weight_bytes: int = 0
    token_bytes: int = 0
    slab_bytes: int = 0
    block_bytes: int = 0
    kv_token_bytes: int = 0
    kv_code_bytes: int = 0
    pool_bytes: int = 0
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Waves by state, readable at any time from any thread. graphs: launch sequences that a device
    keeps for waves of equal shape; graph_kernels: launches in them; graphs_made: so far, those it
    has replaced included."""

    submitted: int
    started: int
    completed: int
    phase: str  # idle, running, closed, poisoned
    graphs: int = 0
    graph_kernels: int = 0
    graphs_made: int = 0


class Engine(Protocol):
    """An engine runs waves in order and calls `on_done` on the event loop's thread.

    submit never blocks; it raises EngineError for an invalid wave (nothing changed), EnginePoisoned
    after a fatal failure, and returns False when `ring_depth` waves are in flight.
    """

    @property
    def info(self) -> EngineInfo: ...

    def start(self, on_done: Callable[[Done], None]) -> None:
        """Attach to the running event loop. Called once, before the first submit."""

    def submit(self, wave: Wave) -> bool: ...

    def progress(self) -> Progress: ...

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish or abandon what runs, release everything. Idempotent."""
