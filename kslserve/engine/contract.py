"""The rules for waves of native/include/ksl.h, for engines without native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kslserve.engine.model import PoolSizes
from kslserve.engine.types import (
    CUTS_MAX,
    DRAFT_MAX,
    SPANS,
    Draft,
    OpKind,
    Row,
    RowKind,
    SlotConfig,
    StateOp,
    Wave,
)
from kslserve.errors import EngineError

TOP_MAX = 20
STOP_MAX = 32
UNSET = -1  # an entry of a block table that was never set


class SlotView(Protocol):
    """What the rules need of a slot."""

    @property
    def table(self) -> list[int]: ...

    @property
    def config(self) -> SlotConfig | None: ...

    @property
    def last(self) -> int:
        """The id sampled last since it was configured, or -1."""

    @property
    def mask(self) -> Any: ...


class Contract:
    """Checks waves against the pools and the slots as they are before the wave."""

    def __init__(
        self, sizes: PoolSizes, vocab: int, has_mtp: bool, slots: Sequence[SlotView]
    ) -> None:
        self.sizes = sizes
        self.vocab = vocab
        self.has_mtp = has_mtp
        self.slots = slots

    def check(self, wave: Wave) -> None:
        """EngineError, with the rule and where it was broken."""
        sizes = self.sizes
        tables = self._edited(wave)
        for op in (*wave.before, *wave.after):
            self._check_op(op)
        configured = {op.a for op in wave.before if op.kind is OpKind.CONFIGURE}
        masked = {op.a for op in wave.before if op.kind is OpKind.MASK and op.data is not None}
        used_slots: set[int] = set()
        used_slabs: set[int] = set()
        columns = 0
        for index, row in enumerate(wave.rows):
            where = f"row {index}"
            self._check_row(row, where)
            columns += row.n
            _once(used_slots, row.slot, f"{where}: slot")
            _once(used_slabs, row.slab, f"{where}: slab")
            slot = self.slots[row.slot]
            if row.kind in (RowKind.LAST, RowKind.VERIFY):
                ready = slot.config is not None or row.slot in configured
                _require(ready, f"{where}: slot {row.slot} is not configured")
            if row.tokens[0] == -1:
                ready = slot.last >= 0 and row.slot not in configured
                _require(ready, f"{where}: slot {row.slot} has sampled nothing")
            if row.kind is RowKind.VERIFY and row.n > 1:
                single = row.slot in masked or slot.mask is not None
                _require(not single, f"{where}: drafts under a mask")
        for index, row in enumerate(wave.rows):
            for _, slab in row.cuts:
                _once(used_slabs, slab, f"row {index}: cut slab")
        most = sizes.wave_columns
        _require(columns <= most, f"{columns} columns exceed the {most} of a wave")
        self._check_blocks(wave.rows, tables)

    def _check_blocks(self, rows: Sequence[Row], tables: dict[int, list[int]]) -> None:
        """Every position has a block, and no row touches one that another row writes."""
        size = self.sizes.block_tokens
        writers: dict[int, int] = {}
        for index, row in enumerate(rows):
            table = tables.get(row.slot) or self.slots[row.slot].table
            first, last = row.start // size, (row.start + row.n + row.propose - 1) // size
            for entry in range(last + 1):
                _require(table[entry] != UNSET, f"row {index}: table entry {entry} is unset")
            for block in table[first : last + 1]:
                _require(block not in writers, f"row {index}: block {block} has two writers")
                writers[block] = index
        for index, row in enumerate(rows):
            table = tables.get(row.slot) or self.slots[row.slot].table
            for block in table[: row.start // size]:
                _require(block not in writers, f"row {index}: reads block {block} being written")

    def _edited(self, wave: Wave) -> dict[int, list[int]]:
        """Tables after the wave's edits, of the slots that have any."""
        tables: dict[int, list[int]] = {}
        for edit in wave.edits:
            _require(0 <= edit.slot < self.sizes.slots, f"edit: slot {edit.slot}")
            end = edit.start + len(edit.ids)
            _require(len(edit.ids) >= 1, "edit: no entries")
            _require(
                edit.start >= 0 and end <= self.sizes.blocks_per_slot, f"edit: entries up to {end}"
            )
            for block in edit.ids:
                _require(0 <= block < self.sizes.blocks, f"edit: block {block}")
            if edit.slot not in tables:
                tables[edit.slot] = list(self.slots[edit.slot].table)
            tables[edit.slot][edit.start : end] = edit.ids
        return tables

    def _check_op(self, op: StateOp) -> None:
        kind, where = op.kind, op.kind.name
        slots, slabs, blocks = self.sizes.slots, self.sizes.slabs, self.sizes.blocks
        if kind in SPANS:
            most = slabs if kind in (OpKind.DROP_SLABS, OpKind.TOUCH_SLABS) else blocks
            _require(op.a >= 0 and op.b >= 1 and op.a + op.b <= most, f"{where}: {op.a}+{op.b}")
        elif kind in (OpKind.CONFIGURE, OpKind.MASK, OpKind.FORCE):
            _require(0 <= op.a < slots, f"{where}: slot {op.a}")
        elif kind in (OpKind.COPY_BLOCK, OpKind.SAVE_BLOCK, OpKind.LOAD_BLOCK):
            _require(0 <= op.a < blocks, f"{where}: block {op.a}")
        else:
            _require(0 <= op.a < slabs, f"{where}: slab {op.a}")
        if kind is OpKind.COPY_SLAB:
            _require(0 <= op.b < slabs and op.a != op.b, f"{where}: slab {op.b}")
        elif kind is OpKind.COPY_BLOCK:
            _require(0 <= op.b < blocks and op.a != op.b, f"{where}: block {op.b}")
        elif kind is OpKind.CONFIGURE:
            _require(isinstance(op.data, SlotConfig), f"{where}: no configuration")
            _require(len(op.data.stop_ids) <= STOP_MAX, f"{where}: more than {STOP_MAX} stop ids")
        elif kind is OpKind.FORCE:
            _require(all(0 <= i < self.vocab for i in op.data), f"{where}: id out of range")

    def _check_row(self, row: Row, where: str) -> None:
        sizes = self.sizes
        _require(0 <= row.slot < sizes.slots, f"{where}: slot {row.slot}")
        _require(0 <= row.slab < sizes.slabs, f"{where}: slab {row.slab}")
        _require(row.n >= 1 and row.start >= 0, f"{where}: positions {row.start}+{row.n}")
        most = sizes.blocks_per_slot * sizes.block_tokens
        end = row.start + row.n + row.propose
        _require(end <= most, f"{where}: ends at position {end} of {most}")
        verify, score = row.kind is RowKind.VERIFY, row.kind is RowKind.SCORE
        _require(verify or row.draft is Draft.NONE, f"{where}: drafts outside VERIFY")
        drafts = row.n - 1
        _require(
            not verify or drafts <= (0 if row.draft is Draft.NONE else DRAFT_MAX),
            f"{where}: {drafts} drafts",
        )
        propose = DRAFT_MAX if self.has_mtp and (verify or row.kind is RowKind.LAST) else 0
        _require(0 <= row.propose <= propose, f"{where}: propose {row.propose}")
        _require(row.top_n is None or 0 <= row.top_n <= TOP_MAX, f"{where}: top {row.top_n}")
        expected = 1 if row.draft is Draft.OWN else row.n + score
        _require(len(row.tokens) == expected, f"{where}: {len(row.tokens)} tokens, not {expected}")
        for i, token in enumerate(row.tokens):
            low = -1 if i == 0 or (score and i == row.n) else 0
            _require(low <= token < self.vocab, f"{where}: token {token} at {i}")
        _require(len(row.cuts) <= (0 if verify else CUTS_MAX), f"{where}: {len(row.cuts)} cuts")
        after = 0
        for offset, slab in row.cuts:
            _require(after < offset <= row.n, f"{where}: cut at {offset}")
            after = offset
            _require(0 <= slab < sizes.slabs, f"{where}: cut to slab {slab}")


def _once(used: set[int], index: int, what: str) -> None:
    _require(index not in used, f"{what} {index} is used twice")
    used.add(index)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise EngineError(f"Invalid wave: {what}.")
