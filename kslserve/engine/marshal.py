"""Waves into C structs, in buffers that are made once and reused.

The layouts are those of native/include/ksl.h in native byte order and alignment; `check_sizes`
compares them with the library. The library copies what a wave holds during submit; the buffers that
it writes later (log-probabilities, taps) or reads later (SAVE and LOAD images) are returned to the
caller, who keeps them until the wave's end record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.engine.buffers import IdBuffer, StructBuffer
from kslserve.engine.sampling import int32, sampling_struct
from kslserve.engine.types import (
    CUTS_MAX,
    SPANS,
    Draft,
    OpKind,
    Row,
    RowKind,
    StateOp,
    Wave,
)
from kslserve.errors import EngineError

# The first token by itself: nearly every record has one.
DONE = struct.Struct("@Q8ii64s64si4Q")
IDS = struct.Struct("@16i")
ROW = struct.Struct("@18iP")
PLAIN_ROW = struct.Struct("@10i40x")  # no cuts, no log-probabilities
OP = struct.Struct("@4iP")
START, START_AT = struct.Struct("@i"), 16  # of a row, and where it is
EDIT = struct.Struct("@4i")
WAVE = struct.Struct("@Q8i7P")
WAVE_ID = struct.Struct("@Q")
LAYOUTS = {
    "ksl_done": DONE,
    "ksl_row": ROW,
    "ksl_op": OP,
    "ksl_edit": EDIT,
    "ksl_wave": WAVE,
}
LOGPROB = np.dtype([("id", np.int32), ("logprob", np.float32)])
NO_CUTS = (0,) * (2 * CUTS_MAX)
# Plain numbers compare faster than looked-up enum members.
PREFILL, LAST, SCORE = int(RowKind.PREFILL), int(RowKind.LAST), int(RowKind.SCORE)
OWN = int(Draft.OWN)


@dataclass(slots=True)
class Pending:
    """What a submitted wave still needs: logprobs, by row that asked for them (array, and whether
    all of it is filled); taps by name; and everything that the library may touch."""

    logprobs: dict[int, tuple[npt.NDArray[Any], bool]] = field(default_factory=dict)
    taps: list[tuple[str, npt.NDArray[np.float32]]] = field(default_factory=list)
    tap_structs: Any = None
    pinned: list[Any] = field(default_factory=list)


def check_sizes(ffi: Any, lib: Any) -> None:
    """ImportError when a struct of this module, or of the binding, has another size in the
    library."""
    sizes = {name: layout.size for name, layout in LAYOUTS.items()}
    sizes["ksl_logprob"] = LOGPROB.itemsize
    for name in (
        "ksl_error", "ksl_tensor", "ksl_config", "ksl_info", "ksl_sampling", "ksl_op",
        "ksl_logprob", "ksl_cut", "ksl_row", "ksl_edit", "ksl_tap", "ksl_wave", "ksl_done",
        "ksl_progress",
    ):  # fmt: skip
        native = lib.ksl_sizeof(name.encode())
        if {ffi.sizeof(name), sizes.get(name, native)} != {native}:
            raise ImportError(
                f"reinstall kslserve: struct {name} has {native} bytes in the native module, "
                f"{sizes.get(name, ffi.sizeof(name))} in the package"
            )


class WavePacker:
    """Fills one ksl_wave per call of `pack`. vocab: mask width. tap_width: most floats that a tap
    has per column."""

    def __init__(self, ffi: Any, vocab: int, tap_width: int, rows: int, columns: int) -> None:
        self._ffi = ffi
        self._vocab = vocab
        self._tap_width = tap_width
        self._rows = StructBuffer(ffi, ROW.size, rows)
        self._before = StructBuffer(ffi, OP.size, 16)
        self._after = StructBuffer(ffi, OP.size, 16)
        self._edits = StructBuffer(ffi, EDIT.size, 16)
        self._tokens = IdBuffer(columns + rows)
        self._blocks = IdBuffer(64)
        self._wave = StructBuffer(ffi, WAVE.size, 1)
        self._standing: Sequence[Row] | None = None  # rows of one plain column each, as packed
        self._nothing = Pending()  # of all waves that need nothing
        self._pointer = ffi.cast("ksl_wave *", self._wave.address)

    def pack(self, wave: Wave) -> tuple[Any, Pending, list[Any]]:
        """(ksl_wave pointer, what to keep until the wave ends, what to keep during submit).
        EngineError for values that no struct can hold."""
        if (
            wave.same_rows
            and wave.rows is self._standing
            and not (wave.before or wave.after or wave.edits or wave.taps)
        ):
            return self._move(wave), self._nothing, []
        pending = Pending()
        keep: list[Any] = []
        self._standing = None
        try:
            tokens = self._pack_rows(wave.rows, pending)
            self._pack_ops(self._before, wave.before, pending, keep)
            self._pack_ops(self._after, wave.after, pending, keep)
            blocks = self._pack_edits(wave)
            taps = self._pack_taps(wave, pending)
            WAVE.pack_into(
                self._wave.memory, 0, wave.id,
                len(wave.before), len(wave.after), len(wave.rows), tokens, len(wave.edits),
                blocks, len(wave.taps), 0,
                self._before.address, self._after.address, self._rows.address,
                self._tokens.address, self._edits.address, self._blocks.address, taps,
            )  # fmt: skip
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"Invalid wave: {error}.") from error
        one_each = tokens == len(wave.rows) and not pending.logprobs
        if one_each and not (wave.before or wave.after or wave.edits or wave.taps):
            self._standing = wave.rows
        return self._pointer, pending, keep

    def _move(self, wave: Wave) -> Any:
        """`pack` of the rows that the structs hold, a token each, with other starts and tokens."""
        rows, tokens = self._rows.memory, self._tokens.view
        try:
            for at, row in enumerate(wave.rows):
                (tokens[at],) = row.tokens
                START.pack_into(rows, at * ROW.size + START_AT, row.start)
            WAVE_ID.pack_into(self._wave.memory, 0, wave.id)
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            self._standing = None
            raise EngineError(f"Invalid wave: {error}.") from error
        return self._pointer

    def _pack_rows(self, rows: Sequence[Row], pending: Pending) -> int:
        """Rows and their tokens; the number of tokens."""
        memory = self._rows.fit(len(rows))
        total = 0
        for row in rows:
            total += len(row.tokens)
        values, view = self._tokens.fit(total), self._tokens.view
        at = place = 0
        for row in rows:
            ids = row.tokens
            n = len(ids)
            if n == 1:
                view[at] = ids[0]
            else:
                values[at : at + n] = ids
            if n != row.n or row.draft == OWN or row.kind == SCORE:
                _check_length(row, n)
            if row.top_n is None and not row.cuts:
                PLAIN_ROW.pack_into(
                    memory, place,
                    row.kind, row.slot, row.slab, row.draft, row.start, row.n, at, row.propose,
                    0, 0,
                )  # fmt: skip
            else:
                self._pack_full_row(memory, place, row, at, pending)
            at += n
            place += ROW.size
        return at

    def _pack_full_row(
        self, memory: bytearray, place: int, row: Row, at: int, pending: Pending
    ) -> None:
        address, top_n = 0, row.top_n or 0
        if row.top_n is not None and row.kind != PREFILL:
            positions = 1 if row.kind == LAST else row.n
            logprobs = np.zeros((positions, 1 + top_n), dtype=LOGPROB)
            pending.logprobs[place // ROW.size] = logprobs, row.kind == SCORE
            address = logprobs.ctypes.data
        if len(row.cuts) > CUTS_MAX:
            raise ValueError(f"a row has {len(row.cuts)} cuts")
        flat = [value for cut in row.cuts for value in cut]
        ROW.pack_into(
            memory, place,
            row.kind, row.slot, row.slab, row.draft, row.start, row.n, at, row.propose,
            len(row.cuts), top_n, *flat, *NO_CUTS[len(flat) :], address,
        )  # fmt: skip

    def _pack_ops(
        self, buffer: StructBuffer, ops: Sequence[StateOp], pending: Pending, keep: list[Any]
    ) -> None:
        if not ops:
            return
        memory = buffer.fit(len(ops))
        for i, op in enumerate(ops):
            n, address = 0, 0
            if op.kind is OpKind.CONFIGURE:
                sampling = sampling_struct(self._ffi, op.data, keep)
                address = int(self._ffi.cast("uintptr_t", sampling))
            elif op.kind is OpKind.FORCE:
                ids = int32(op.data)
                keep.append(ids)
                n, address = len(ids), ids.ctypes.data
            elif op.kind is OpKind.MASK and op.data is not None:
                mask = np.ascontiguousarray(op.data, dtype=np.uint32)
                if mask.size != (self._vocab + 31) // 32:
                    raise ValueError(f"a mask of {mask.size} words")
                keep.append(mask)
                address = mask.ctypes.data
            elif op.kind in SPANS:
                n = op.b
            elif op.data is not None:
                if not op.data.flags.c_contiguous or not op.data.flags.writeable:
                    raise ValueError("a state image must be contiguous and writable")
                pending.pinned.append(op.data)
                n, address = op.data.nbytes, op.data.ctypes.data
            OP.pack_into(memory, i * OP.size, op.kind, op.a, op.b, n, address)

    def _pack_edits(self, wave: Wave) -> int:
        """Edits and their block ids; the number of ids."""
        if not wave.edits:
            return 0
        memory = self._edits.fit(len(wave.edits))
        blocks = self._blocks.fit(sum(len(edit.ids) for edit in wave.edits))
        at = 0
        for i, edit in enumerate(wave.edits):
            n = len(edit.ids)
            blocks[at : at + n] = edit.ids
            EDIT.pack_into(memory, i * EDIT.size, edit.slot, edit.start, n, at)
            at += n
        return at

    def _pack_taps(self, wave: Wave, pending: Pending) -> int:
        """Address of the tap structs."""
        if not wave.taps:
            return 0
        ffi = self._ffi
        columns = sum(row.n for row in wave.rows)
        structs = ffi.new("ksl_tap[]", len(wave.taps))
        for tap, name in zip(structs, wave.taps, strict=True):
            data = np.zeros(columns * self._tap_width, dtype=np.float32)
            text = ffi.new("char[]", name.encode())
            tap.name = text
            tap.data = ffi.from_buffer("float[]", data)
            tap.capacity = data.size
            pending.pinned.append(text)
            pending.taps.append((name, data))
        pending.tap_structs = structs
        return int(ffi.cast("uintptr_t", structs))


def _check_length(row: Row, n: int) -> None:
    # The library sees one flat list of tokens and cannot know that a row's part is too short.
    expected = 1 if row.draft == OWN else row.n + (row.kind == SCORE)
    if n != expected:
        raise ValueError(f"a row of {row.n} positions has {n} tokens")
