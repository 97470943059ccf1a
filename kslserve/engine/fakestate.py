"""What a fake engine remembers.

No model is computed. A sequence's state is the list of its tokens and, beside it, a chain of
hashes, one per position, each over all tokens up to it. Slabs hold such a timeline, KV blocks the
chain values of their positions, so that state from the wrong sequence, a missing position or a
block that somebody else wrote is found: that is an AssertionError, since only the caller's
bookkeeping can cause it. A wave that breaks a rule which the native engine checks too is an
EngineError and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kslserve.engine.contract import UNSET, Contract
from kslserve.engine.model import PoolSizes
from kslserve.engine.types import (
    Draft,
    OpKind,
    Row,
    RowDone,
    RowKind,
    SlotConfig,
    StateOp,
    Wave,
)

MASK64 = (1 << 64) - 1


class Timeline:
    """A slab: tokens [0, n) of one sequence and the hash chain over them."""

    __slots__ = ("chain", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.chain: list[int] = []

    def copy_from(self, other: Timeline) -> None:
        self.tokens = list(other.tokens)
        self.chain = list(other.chain)

    def cut(self, n: int) -> Timeline:
        part = Timeline()
        part.tokens = self.tokens[:n]
        part.chain = self.chain[:n]
        return part

    def append(self, token: int) -> int:
        """Extend by one token; the new chain value."""
        last = self.chain[-1] if self.chain else 0
        value = ((last ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK64
        value ^= value >> 29
        self.tokens.append(token)
        self.chain.append(value)
        return value


class Slot:
    """A slot: its block table and what sampling needs. salt: of the seed, 0 at temperature 0.
    script is free for the model's use."""

    __slots__ = (
        "config", "drafts", "forced", "last", "latched", "mask", "salt", "sampled", "script",
        "stop_ids", "table",
    )  # fmt: skip

    def __init__(self, blocks: int) -> None:
        self.table = [UNSET] * blocks
        self.config: SlotConfig | None = None
        self.configure(None)

    def configure(self, config: SlotConfig | None) -> None:
        self.config = config
        warm = config is not None and config.sampling.temperature > 0.0
        self.salt = config.seed * 0xD6E8FEB86659FD93 if config is not None and warm else 0
        self.stop_ids = frozenset(config.stop_ids) if config else frozenset()
        self.latched = False
        self.mask: Any = None
        self.forced: list[int] = []
        self.drafts: list[int] = []
        self.last = -1
        self.sampled = 0
        self.script: Any = None


class TokenModel(Protocol):
    """Chooses tokens. Both methods are pure except for `slot.script`."""

    def token(self, slot: Slot, timeline: Timeline) -> int:
        """The id sampled after the timeline; -1 for bad logits."""

    def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
        """[(token, its log-probability), n most probable...]; (-1, 0.0) first for token -1."""


class HashModel:
    """Ids below `limit` as a hash of (seed, all tokens so far), thus of nothing that batching could
    change. Temperature 0 ignores the seed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def token(self, slot: Slot, timeline: Timeline) -> int:
        value = ((timeline.chain[-1] ^ slot.salt) * 0xA0761D6478BD642F) & MASK64
        first = (value >> 24) % self.limit
        if slot.mask is None:
            return first
        for step in range(self.limit):
            candidate = (first + step) % self.limit
            if int(slot.mask[candidate >> 5]) >> (candidate & 31) & 1:
                return candidate
        return -1

    def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
        value = timeline.chain[-1]
        best = [((value >> 8) + 7 * k) % self.limit for k in range(n)]
        entries = [(i, -0.25 - k) for k, i in enumerate(best)]
        if token < 0:
            return [(-1, 0.0), *entries]
        own = next((p for i, p in entries if i == token), -1.0 - float(value % 16))
        return [(token, own), *entries]


class FakeState:
    """All pools. strict: check that the state is what the tokens imply. dropped: slabs and blocks
    that were, so far."""

    def __init__(
        self, sizes: PoolSizes, vocab: int, model: TokenModel, has_mtp: bool, strict: bool
    ) -> None:
        self.sizes = sizes
        self.vocab = vocab
        self.model = model
        self.strict = strict
        self.dropped = 0
        # Images of SAVE ops: a count and one 8-byte value per position.
        self.slab_bytes = 8 * (1 + sizes.blocks_per_slot * sizes.block_tokens)
        self._loading: dict[int, npt.NDArray[np.uint8]] = {}
        self.slots = [Slot(sizes.blocks_per_slot) for _ in range(sizes.slots)]
        self.slabs = [Timeline() for _ in range(sizes.slabs)]
        self._contract = Contract(sizes, vocab, has_mtp, self.slots)
        self.blocks = [[UNSET] * sizes.block_tokens for _ in range(sizes.blocks)] if strict else []

    def validate(self, wave: Wave) -> None:
        """EngineError for a wave that the contract forbids."""
        self._contract.check(wave)

    # ------------------------------------------------------------ execution

    def run(self, wave: Wave) -> list[RowDone]:
        """Apply a validated wave."""
        for edit in wave.edits:
            self.slots[edit.slot].table[edit.start : edit.start + len(edit.ids)] = edit.ids
        for op in wave.before:
            self._apply(op)
        done = [self._row(row) for row in wave.rows]
        for op in wave.after:
            self._apply(op)
        return done

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
        elif kind is OpKind.DROP_SLABS:
            self.dropped += op.b
            for slab in range(op.a, op.a + op.b):
                self.slabs[slab] = Timeline()
                self.slabs[slab].append(UNSET)  # of no sequence
        elif self.strict and kind is OpKind.DROP_BLOCKS:
            self.dropped += op.b
            for block in range(op.a, op.a + op.b):
                self.blocks[block] = [UNSET] * self.sizes.block_tokens
        elif self.strict and kind is OpKind.COPY_BLOCK:
            self.blocks[op.b] = list(self.blocks[op.a])
        elif self.strict and kind is OpKind.SAVE_BLOCK:
            _save(op.data, self.blocks[op.a])
        elif self.strict and kind is OpKind.LOAD_BLOCK:
            self.blocks[op.a] = _load(op.data)

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
        plain = row.n == 1 and row.kind is RowKind.LAST and top_n is None
        if plain and not (self.strict or row.cuts or row.propose):
            # As fast as can be: what this engine takes counts as the host's in benches.
            token = row.tokens[0]
            timeline.append(slot.last if token < 0 else int(token))
            slot.drafts = []
            self._sample(slot, timeline, row, result)
            result.position = len(timeline.tokens)
            return result
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
        if token < 0:
            slot.latched = result.bad_logits = True
            return token
        result.tokens += (token,)
        if result.logprobs is not None:
            result.logprobs.append(self.model.top(timeline, token, row.top_n or 0))
        slot.last = token
        slot.sampled += 1
        if token in slot.stop_ids:
            slot.latched = result.stop = True
        return token

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


def _save(buffer: Any, values: Sequence[int]) -> None:
    words = buffer.view(np.uint64)
    words[0] = len(values)
    words[1 : 1 + len(values)] = np.array([v & MASK64 for v in values], dtype=np.uint64)


def _load(buffer: Any) -> list[int]:
    words = buffer.view(np.uint64)
    values = [int(v) for v in words[1 : 1 + int(words[0])]]
    return [UNSET if v == MASK64 else v for v in values]
