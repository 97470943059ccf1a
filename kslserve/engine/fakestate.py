"""What a fake engine remembers.

No model is computed. Slabs hold timelines of `fakemodel`, KV blocks the chain values of their
positions, so that state from the wrong sequence, a missing position or a block that somebody else
wrote is found: that is an AssertionError, since only the caller's bookkeeping can cause it. A wave
that breaks a rule which the native engine checks too is an EngineError and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.engine.contract import UNSET, Contract
from kslserve.engine.fakemodel import Slot, Timeline, TokenModel
from kslserve.engine.model import PoolSizes
from kslserve.engine.types import (
    Draft,
    OpKind,
    Row,
    RowDone,
    RowKind,
    StateOp,
    Wave,
)

Rows = list[RowDone] | Callable[[], list[RowDone]]

MASK64 = (1 << 64) - 1


class FakeState:
    """All pools. strict: check that the state is what the tokens imply. dropped, touched: slabs
    and blocks that were, so far."""

    def __init__(
        self, sizes: PoolSizes, vocab: int, model: TokenModel, has_mtp: bool, strict: bool
    ) -> None:
        self.sizes = sizes
        self.vocab = vocab
        self.model = model
        self.strict = strict
        self.dropped = self.touched = 0
        # Images of SAVE ops: a count and one 8-byte value per position.
        self.slab_bytes = 8 * (1 + sizes.blocks_per_slot * sizes.block_tokens)
        self._standing: Sequence[Row] | None = None  # rows of one simple column each, as last run
        self._loading: dict[int, npt.NDArray[np.uint8]] = {}
        self.slots = [Slot(sizes.blocks_per_slot) for _ in range(sizes.slots)]
        self.slabs = [Timeline() for _ in range(sizes.slabs)]
        self._contract = Contract(sizes, vocab, has_mtp, self.slots)
        self.blocks = [[UNSET] * sizes.block_tokens for _ in range(sizes.blocks)] if strict else []

    def validate(self, wave: Wave) -> None:
        """EngineError for a wave that the contract forbids."""
        self._contract.check(wave)

    # ------------------------------------------------------------ execution

    def run(self, wave: Wave) -> tuple[Rows, list[int] | None]:
        """Apply a validated wave; `rows` and `sampled` of its Done."""
        rows_only = not (wave.before or wave.after or wave.edits)
        if rows_only and wave.same_rows and wave.rows is self._standing:
            return self._decode(wave.rows)
        for edit in wave.edits:
            self.slots[edit.slot].table[edit.start : edit.start + len(edit.ids)] = edit.ids
        for op in wave.before:
            self._apply(op)
        done = [self._row(row) for row in wave.rows]
        for op in wave.after:
            self._apply(op)
        simple = rows_only and not self.strict and all(map(_is_simple, wave.rows))
        self._standing = wave.rows if simple else None
        return done, [row.tokens[0] for row in done] if all(map(_is_plain, done)) else None

    def _apply(self, op: StateOp) -> None:
        kind = op.kind
        if kind is OpKind.ZERO_SLAB:
            self.slabs[op.a] = Timeline()
        elif kind is OpKind.COPY_SLAB:
            self.slabs[op.b].copy_from(self.slabs[op.a])
        elif kind is OpKind.CONFIGURE:
            self.slots[op.a].configure(op.data)
        elif kind is OpKind.MASK:
            self.slots[op.a].mask = None if op.data is None else np.array(op.data, np.uint32)
        elif kind is OpKind.FORCE:
            self.slots[op.a].forced = [int(i) for i in op.data]
        elif kind is OpKind.SAVE_SLAB:
            image = np.zeros(self.slab_bytes, np.uint8)
            _save(image, self.slabs[op.a].tokens)
            op.data[:] = image[op.b : op.b + op.data.nbytes]
        elif kind is OpKind.LOAD_SLAB:
            self._load_slab(op)
        elif kind in (OpKind.DROP_SLABS, OpKind.TOUCH_SLABS):
            self._count(op)
            for slab in range(op.a, op.a + op.b):
                self.slabs[slab] = Timeline()
                self.slabs[slab].append(UNSET)  # of no sequence
        elif self.strict and kind in (OpKind.DROP_BLOCKS, OpKind.TOUCH_BLOCKS):
            self._count(op)
            for block in range(op.a, op.a + op.b):
                self.blocks[block] = [UNSET] * self.sizes.block_tokens
        elif self.strict and kind is OpKind.COPY_BLOCK:
            self.blocks[op.b] = list(self.blocks[op.a])
        elif self.strict and kind is OpKind.SAVE_BLOCK:
            _save(op.data, self.blocks[op.a])
        elif self.strict and kind is OpKind.LOAD_BLOCK:
            self.blocks[op.a] = _load(op.data)

    def _count(self, op: StateOp) -> None:
        if op.kind in (OpKind.DROP_SLABS, OpKind.DROP_BLOCKS):
            self.dropped += op.b
        else:
            self.touched += op.b

    def _load_slab(self, op: StateOp) -> None:
        """A part; the slab is there when its last one is, and all before it were."""
        if op.b == 0:
            self._loading[op.a] = np.zeros(0, np.uint8)
        so_far = self._loading[op.a]
        assert so_far.nbytes == op.b, f"slab {op.a}: a part at {op.b} after {so_far.nbytes} bytes"
        image = self._loading[op.a] = np.concatenate([so_far, op.data])
        self.slabs[op.a] = Timeline()
        if image.nbytes == self.slab_bytes:
            for token in _load(image):
                self.slabs[op.a].append(token)

    def _row(self, row: Row) -> RowDone:
        slot = self.slots[row.slot]
        timeline = self.slabs[row.slab]
        if slot.latched:
            return RowDone(row.slot, (), len(timeline.tokens), latched=True)
        if self.strict:
            self._check_state(row, slot, timeline)
        result = RowDone(row.slot, (), 0)
        top_n = row.top_n
        tokens = self._inputs(row, slot)
        before = len(timeline.tokens)
        if top_n is not None:
            result.logprobs = []
        if row.kind is RowKind.VERIFY:
            self._verify(row, slot, timeline, tokens, result)
        else:
            for i in range(row.n):
                timeline.append(tokens[i])
                if row.kind is RowKind.SCORE and result.logprobs is not None:
                    result.logprobs.append(self.model.top(timeline, tokens[i + 1], top_n or 0))
            if row.kind is RowKind.LAST:
                self._sample(slot, timeline, row, result)
        result.position = len(timeline.tokens)
        if self.strict:
            self._write(slot, timeline, before)
        for offset, slab in row.cuts:
            self.slabs[slab] = timeline.cut(before + offset)
        slot.drafts = self._propose(row, slot, timeline, result)
        result.drafts = tuple(slot.drafts)
        return result

    def _decode(self, rows: Sequence[Row]) -> tuple[Rows, list[int] | None]:
        """Rows of one plain column each. As fast as can be, since what this engine takes counts as
        the host's in benches."""
        slots, slabs, model = self.slots, self.slabs, self.model
        sampled: list[int] = []
        others: dict[int, RowDone] = {}  # by place
        for row in rows:
            slot = slots[row.slot]
            if slot.latched or slot.forced:
                others[len(sampled)] = self._row(row)
                sampled.append(-1)
                continue
            timeline = slabs[row.slab]
            token = row.tokens[0]
            timeline.append(slot.last if token < 0 else token)
            token = model.token(slot, timeline)
            if token < 0 or token in slot.stop_ids:
                result = others[len(sampled)] = RowDone(row.slot, (), len(timeline.tokens))
                self._take(token, slot, timeline, row, result)
            else:
                slot.last = token
                slot.sampled += 1
            sampled.append(token)
        made = partial(_plain_rows, [(row.slot, row.start + 1) for row in rows], sampled)
        if not others:
            return made, sampled
        return [others.get(i, plain) for i, plain in enumerate(made())], None

    def _inputs(self, row: Row, slot: Slot) -> list[int]:
        tokens = [int(t) for t in row.tokens]
        if tokens[0] == -1:
            tokens[0] = slot.last
        if row.draft is Draft.OWN:
            tokens += slot.drafts[: row.n - 1]
        return tokens

    def _verify(
        self, row: Row, slot: Slot, timeline: Timeline, tokens: list[int], result: RowDone
    ) -> None:
        for i, token in enumerate(tokens):
            timeline.append(token)
            sampled = self._sample(slot, timeline, row, result)
            if slot.latched or i + 1 == len(tokens) or sampled != tokens[i + 1]:
                break
            result.accepted += 1

    def _sample(self, slot: Slot, timeline: Timeline, row: Row, result: RowDone) -> int:
        token = slot.forced.pop(0) if slot.forced else self.model.token(slot, timeline)
        self._take(token, slot, timeline, row, result)
        return token

    def _take(self, token: int, slot: Slot, timeline: Timeline, row: Row, result: RowDone) -> None:
        """What sampling gave, into the slot and the result."""
        if token < 0:
            slot.latched = result.bad_logits = True
            return
        result.tokens += (token,)
        if result.logprobs is not None:
            result.logprobs.append(self.model.top(timeline, token, row.top_n or 0))
        slot.last = token
        slot.sampled += 1
        if token in slot.stop_ids:
            slot.latched = result.stop = True

    def _propose(self, row: Row, slot: Slot, timeline: Timeline, result: RowDone) -> list[int]:
        """Drafts that agree with what will be sampled about three times out of four."""
        drafts: list[int] = []
        if not row.propose or not result.tokens or slot.latched:
            return drafts
        ahead = timeline.cut(len(timeline.tokens))
        token = result.tokens[-1]
        for _ in range(row.propose):
            value = ahead.append(token)
            token = self.model.token(slot, ahead)
            if token < 0:
                break
            if value & 3 == 0:
                token = (token + 1) % self.vocab
            drafts.append(token)
        return drafts

    # ------------------------------------------------------------ strictness

    def _check_state(self, row: Row, slot: Slot, timeline: Timeline) -> None:
        held = len(timeline.tokens)
        assert held == row.start, f"slab {row.slab} holds {held} positions, not {row.start}"
        for block, first, n in self._pieces(slot, 0, row.start):
            found = self.blocks[block][:n]
            assert found == timeline.chain[first : first + n], (
                f"block {block} of slot {row.slot} does not hold positions {first}+{n}"
            )

    def _write(self, slot: Slot, timeline: Timeline, start: int) -> None:
        size = self.sizes.block_tokens
        for position in range(start, len(timeline.chain)):
            self.blocks[slot.table[position // size]][position % size] = timeline.chain[position]

    def _pieces(self, slot: Slot, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(block, first position, positions) of [start, end), start at a block border."""
        size = self.sizes.block_tokens
        for first in range(start, end, size):
            yield slot.table[first // size], first, min(size, end - first)


def _is_simple(row: Row) -> bool:
    """One column that samples, and nothing beside it."""
    return row.kind is RowKind.LAST and row.n == 1 and row.top_n is None and not row.propose


def _is_plain(done: RowDone) -> bool:
    """One token, and nothing else to tell."""
    ended = done.stop or done.latched or done.bad_logits or done.bad_draft
    more = done.drafts or done.accepted or done.logprobs
    return len(done.tokens) == 1 and not ended and not more


def _plain_rows(places: Sequence[tuple[int, int]], sampled: Sequence[int]) -> list[RowDone]:
    """places: slot and position of each row."""
    return [
        RowDone(slot, (token,), position)
        for (slot, position), token in zip(places, sampled, strict=True)
    ]


def _save(buffer: Any, values: Sequence[int]) -> None:
    words = buffer.view(np.uint64)
    words[0] = len(values)
    words[1 : 1 + len(values)] = np.array([v & MASK64 for v in values], dtype=np.uint64)


def _load(buffer: Any) -> list[int]:
    words = buffer.view(np.uint64)
    values = [int(v) for v in words[1 : 1 + int(words[0])]]
    return [UNSET if v == MASK64 else v for v in values]
