"""A synchronous driver of the C ABI for tests: packs waves, waits for them, returns plain values.

Deliberately apart from `kslserve.engine.native`: what it finds is the library, not the bridge.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from _kslserve import ffi, lib

from kslserve.core.sampling import SamplingParams
from kslserve.engine.budget import kv_row_bytes
from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.engine.tensors import TensorTable
from kslserve.engine.types import SPANS, Draft, OpKind, Row, RowKind, SlotConfig, StateOp, TableEdit

ISA_NAMES = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3}
ISA_PATHS = tuple(ffi.string(lib.ksl_isa_list()).decode().split())
ACTIVATION_NUMBERS = {"auto": lib.KSL_ACT_AUTO, "float": lib.KSL_ACT_FLOAT}
KV_NUMBERS = {
    "f32": lib.KSL_KV_F32,
    "bf16": lib.KSL_KV_BF16,
    "fp8": lib.KSL_KV_FP8,
    "q4": lib.KSL_KV_Q4,
    "int8_g64": lib.KSL_KV_INT8_G64,
    "int4_g32": lib.KSL_KV_INT4_G32,
    "int8ring_int4": lib.KSL_KV_INT8RING_INT4,
}
GREEDY = SamplingParams(temperature=0.0)

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


class Refused(Exception):
    """A call returned another code than KSL_OK: (code, text)."""


@dataclass
class RowResult:
    tokens: list[int]
    position: int
    accepted: int
    proposed: int
    flags: int
    logprobs: list[list[tuple[int, float]]] | None = None
    drafts: list[int] = field(default_factory=list)


@dataclass
class WaveResult:
    rows: list[RowResult] = field(default_factory=list)
    taps: dict[str, F32] = field(default_factory=dict)


def _buffer(keep: list[Any], kind: str, data: Any) -> Any:
    if data is None:
        return ffi.NULL
    keep.append(ffi.from_buffer(data))
    return ffi.cast(kind, keep[-1])


class Driver:
    """One open engine. Sizes are small by default: 6 slots, 10 slabs, 96 blocks of 16 tokens; and
    arithmetic is exact, to compare with references."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Sequence[TensorArg],
        *,
        slots: int = 6,
        slabs: int = 10,
        blocks: int = 96,
        block_tokens: int = 16,
        blocks_per_slot: int = 16,
        wave_columns: int = 160,
        kv: str = "f32",
        kv_ring: int = 64,
        activations: str = "float",
        isa: str = "auto",
        threads: int = 1,
        fail_alloc_at: int = 0,
        test_hooks: bool = True,
        portable: bool = False,
        draft_margin: float = 0.0,
        draft_vocab: int = 0,
        library: Any = lib,
    ) -> None:
        self.library, self.kv = library, kv
        self.spec, self.block_tokens, self.blocks_per_slot = spec, block_tokens, blocks_per_slot
        self.engine = ffi.NULL
        keep: list[Any] = []
        config = ffi.new("ksl_config *")
        kinds = bytes(int(kind == "full") for kind in spec.layer_kinds)
        config.layers = len(kinds)
        config.layer_kinds = _buffer(keep, "uint8_t *", kinds)
        for name in [
            "vocab",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "rotary_dims",
            "lin_key_heads",
            "lin_value_heads",
            "lin_key_dim",
            "lin_value_dim",
            "conv_taps",
            "mtp_layers",
            "token_limit",
            "rope_theta",
            "norm_eps",
        ]:
            setattr(config, name, getattr(spec, name))
        config.slots, config.slabs, config.blocks = slots, slabs, blocks
        config.block_tokens, config.max_blocks_per_slot = block_tokens, blocks_per_slot
        config.wave_columns, config.ring_depth = wave_columns, 2
        config.kv_format, config.kv_ring = KV_NUMBERS[kv], kv_ring
        config.activations = ACTIVATION_NUMBERS[activations]
        config.isa, config.threads = ISA_NAMES[isa], threads
        config.test_hooks = test_hooks * lib.KSL_HOOK_OPS | portable * lib.KSL_HOOK_PORTABLE
        config.fail_alloc_at = fail_alloc_at
        config.draft_margin, config.draft_vocab = draft_margin, draft_vocab
        table = TensorTable(tensors)
        out, error = ffi.new("ksl_engine **"), ffi.new("ksl_error *")
        code = library.ksl_open(config, table.structs, len(tensors), out, error)
        table.raise_read_error()
        self._check(code, error)
        self.engine = out[0]
        self.info = ffi.new("ksl_info *")
        self.library.ksl_get_info(self.engine, self.info)
        self._records = ffi.new("ksl_done[]", 64)
        self._polled: deque[Any] = deque()
        self._wave_id = 0

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.engine:
            self.library.ksl_close(self.engine, 10_000)
            self.engine = ffi.NULL

    @staticmethod
    def _check(code: int, error: Any) -> None:
        if code != lib.KSL_OK:
            raise Refused(code, ffi.string(error.text).decode())

    def wave(
        self,
        rows: Sequence[Row] = (),
        *,
        before: Sequence[StateOp] = (),
        after: Sequence[StateOp] = (),
        edits: Sequence[TableEdit] = (),
        taps: Sequence[str] = (),
    ) -> WaveResult:
        """Submit one wave, wait for it. Taps come as [columns, width] float32, flat where rows
        ran fewer columns than they name."""
        return self.submit(rows, before=before, after=after, edits=edits, taps=taps)()

    def submit(
        self,
        rows: Sequence[Row] = (),
        *,
        before: Sequence[StateOp] = (),
        after: Sequence[StateOp] = (),
        edits: Sequence[TableEdit] = (),
        taps: Sequence[str] = (),
    ) -> Callable[[], WaveResult]:
        """The same without waiting, two waves at most: what it returns waits, in order."""
        keep: list[Any] = []
        wave = ffi.new("ksl_wave *")
        self._wave_id += 1
        wave.id = self._wave_id
        tokens: list[int] = []
        row_array = ffi.new("ksl_row[]", max(1, len(rows)))
        columns = 0
        for out, row in zip(row_array, rows, strict=False):
            out.kind, out.slot, out.slab = row.kind, row.slot, row.slab
            out.draft, out.start, out.n = row.draft, row.start, row.n
            out.tokens, out.propose = len(tokens), row.propose
            tokens.extend(int(t) for t in row.tokens)
            out.n_cuts = len(row.cuts)
            for cut, (offset, slab) in zip(out.cuts, row.cuts, strict=False):
                cut.offset, cut.slab = offset, slab
            if row.top_n is not None:
                out.top_n = row.top_n
                keep.append(ffi.new("ksl_logprob[]", row.n * (1 + row.top_n)))
                out.logprobs = keep[-1]
            columns += row.n
        wave.n_rows, wave.rows = len(rows), row_array
        token_array = ffi.new("int32_t[]", tokens or [0])
        wave.n_tokens, wave.tokens = len(tokens), token_array
        wave.n_before, before_array = len(before), self._ops(keep, before)
        wave.n_after, after_array = len(after), self._ops(keep, after)
        wave.before, wave.after = before_array, after_array
        ids = [block for edit in edits for block in edit.ids]
        edit_array = ffi.new("ksl_edit[]", max(1, len(edits)))
        at = 0
        for out, edit in zip(edit_array, edits, strict=False):
            out.slot, out.start, out.n, out.offset = edit.slot, edit.start, len(edit.ids), at
            at += len(edit.ids)
        id_array = ffi.new("int32_t[]", ids or [0])
        wave.n_edits, wave.edits = len(edits), edit_array
        wave.n_block_ids, wave.block_ids = len(ids), id_array
        tap_array = ffi.new("ksl_tap[]", max(1, len(taps)))
        width = max(2 * self.spec.vocab, 4 * self.spec.hidden, 16384)
        arrays = [np.empty(max(1, columns) * width, dtype=np.float32) for _ in taps]
        for out, name, array in zip(tap_array, taps, arrays, strict=False):
            keep.append(ffi.new("char[]", name.encode()))
            out.name, out.data = keep[-1], _buffer(keep, "float *", array)
            out.capacity = array.size
        wave.n_taps, wave.taps = len(taps), tap_array
        error = ffi.new("ksl_error *")
        self._check(self.library.ksl_submit(self.engine, wave, error), error)
        number = self._wave_id

        def wait() -> WaveResult:
            assert keep is not None  # the wave points into it
            result = WaveResult()
            for record in self._drain(number):
                out = row_array[record.row]
                entries = None
                if out.logprobs != ffi.NULL:
                    per = 1 + out.top_n
                    count = record.n_tokens if rows[record.row].kind != RowKind.SCORE else out.n
                    entries = [
                        [(e.id, e.logprob) for e in out.logprobs[i * per : (i + 1) * per]]
                        for i in range(count)
                    ]
                result.rows.append(
                    RowResult(
                        list(record.tokens)[: record.n_tokens],
                        record.position,
                        record.accepted,
                        record.proposed,
                        record.flags,
                        entries,
                        list(record.drafts)[: record.proposed],
                    )
                )
            for index, (name, array) in enumerate(zip(taps, arrays, strict=True)):
                written = tap_array[index].written
                assert written <= array.size
                shape = (columns, -1) if written and written % columns == 0 else (-1,)
                result.taps[name] = array[:written].reshape(shape)
            return result

        return wait

    def _drain(self, wave: int) -> list[Any]:
        records: list[Any] = []
        descriptor = self.library.ksl_event_fd(self.engine)
        while True:
            while self._polled:
                record = self._polled.popleft()
                assert record.wave == wave
                if record.flags & lib.KSL_DONE_WAVE_END:
                    assert record.status == lib.KSL_OK
                    return records
                records.append(record)
            n = self.library.ksl_poll(self.engine, self._records, len(self._records))
            self._polled.extend(ffi.new("ksl_done *", self._records[i]) for i in range(n))
            if n == 0:
                assert select.select([descriptor], [], [], 60)[0], "the wave did not end"

    def _ops(self, keep: list[Any], ops: Sequence[StateOp]) -> Any:
        array = ffi.new("ksl_op[]", max(1, len(ops)))
        keep.append(array)
        for out, op in zip(array, ops, strict=False):
            out.kind, out.a, out.b = op.kind, op.a, op.b
            if op.kind == OpKind.CONFIGURE:
                out.data = self.sampling(keep, op.data)
            elif op.kind in SPANS:
                out.n = op.b
            elif op.data is not None:
                out.n = len(op.data)
                out.data = _buffer(keep, "void *", op.data)
        return array

    @staticmethod
    def sampling(keep: list[Any], config: SlotConfig) -> Any:
        """A ksl_sampling; what it points to is put into `keep`."""
        p = config.sampling
        out = ffi.new("ksl_sampling *")
        keep.append(out)
        out.seed, out.temperature, out.top_p, out.min_p = (
            config.seed,
            p.temperature,
            p.top_p,
            p.min_p,
        )
        out.presence, out.frequency = p.presence_penalty, p.frequency_penalty
        out.repetition, out.top_k = p.repetition_penalty, p.top_k

        def ids(values: Any, kind: str = "int32_t[]") -> tuple[int, Any]:
            values = [] if values is None else list(values)
            keep.append(ffi.new(kind, values or [0]))
            return len(values), keep[-1]

        out.n_stop, out.stop_ids = ids(config.stop_ids)
        out.n_bias, out.bias_ids = ids([i for i, _ in p.logit_bias])
        _, out.bias = ids([b for _, b in p.logit_bias], "float[]")
        out.n_prompt, out.prompt_ids = ids(config.prompt_ids)
        out.n_output, out.output_ids = ids(config.output_ids)
        return out

    # ---- one sequence in one slot

    def slab_image(self, slab: int) -> U8:
        """The SAVE_SLAB image of a slab."""
        image = np.zeros(self.info.slab_bytes, dtype=np.uint8)
        self.wave(before=[StateOp(OpKind.SAVE_SLAB, slab, data=image)])
        return image

    def block_image(self, block: int) -> U8:
        image = np.zeros(self.info.block_bytes, dtype=np.uint8)
        self.wave(before=[StateOp(OpKind.SAVE_BLOCK, block, data=image)])
        return image

    def begin(
        self,
        slot: int,
        *,
        slab: int | None = None,
        sampling: SamplingParams = GREEDY,
        seed: int = 7,
        stop_ids: tuple[int, ...] = (),
        prompt_ids: Any = None,
        output_ids: Any = None,
        first_block: int | None = None,
    ) -> Stream:
        """Configure a slot for a new sequence: its slab is zeroed (by default that of the slot's
        number) and its table filled with `blocks_per_slot` blocks."""
        slab = slot if slab is None else slab
        first = slot * self.blocks_per_slot if first_block is None else first_block
        blocks = list(range(first, first + self.blocks_per_slot))
        config = SlotConfig(sampling, seed, stop_ids, prompt_ids, output_ids)
        self.wave(
            before=[
                StateOp(OpKind.ZERO_SLAB, slab),
                StateOp(OpKind.CONFIGURE, slot, data=config),
            ],
            edits=[TableEdit(slot, 0, blocks)],
        )
        return Stream(self, slot, slab, blocks)


@dataclass
class Stream:
    """A slot in use. `position` follows the engine."""

    driver: Driver
    slot: int
    slab: int
    blocks: list[int]
    position: int = 0

    def row(
        self,
        kind: RowKind,
        tokens: Any,
        n: int | None = None,
        **options: Any,
    ) -> Row:
        return Row(
            kind,
            self.slot,
            self.slab,
            self.position,
            len(tokens) if n is None else n,
            tokens,
            **options,
        )

    def run(self, row: Row, taps: Sequence[str] = ()) -> WaveResult:
        """A wave of this row alone; moves the position."""
        result = self.driver.wave([row], taps=taps)
        self.position = result.rows[0].position
        return result

    def prefill(self, ids: Any, plan: Sequence[int] | None = None) -> None:
        """All of ids as PREFILL rows of the lengths in plan (the last takes the rest)."""
        at = 0
        for n in [*(plan or ()), len(ids)]:
            part = ids[at : at + n]
            if len(part):
                self.run(self.row(RowKind.PREFILL, part))
            at += len(part)

    def last(self, ids: Any, **options: Any) -> int:
        """Run ids as one LAST row; the sampled id."""
        return self.run(self.row(RowKind.LAST, ids, **options)).rows[0].tokens[0]

    def decode(self, n: int) -> list[int]:
        """n plain decode rows that take the id sampled last."""
        out: list[int] = []
        for _ in range(n):
            row = self.run(self.row(RowKind.LAST, [-1])).rows[0]
            out += row.tokens
            if row.flags:
                break
        return out

    def verify(self, first: int, drafts: Sequence[int] = (), **options: Any) -> RowResult:
        """One VERIFY row with given drafts."""
        draft = Draft.GIVEN if drafts else Draft.NONE
        row = self.row(RowKind.VERIFY, [first, *drafts], draft=draft, **options)
        return self.run(row).rows[0]

    def share(self, blocks: Sequence[int]) -> None:
        """Put blocks of another sequence at the start of this table."""
        self.blocks[: len(blocks)] = blocks
        if blocks:
            self.driver.wave(edits=[TableEdit(self.slot, 0, list(blocks))])

    def images(self) -> bytes:
        """State of the sequence as bytes: the slab, and K and V of its positions in every layer."""
        d = self.driver
        image = d.slab_image(self.slab)
        parts = [image.tobytes()]
        tokens = d.block_tokens
        layers = sum(k == "full" for k in d.spec.layer_kinds) + d.spec.mtp_layers
        rows = tokens * d.spec.kv_heads
        sides = [kv_row_bytes(d.spec.head_dim, d.kv, side) for side in (0, 1)]
        planes = [rows * width for side in sides for width in side]
        for index in range(-(-self.position // tokens) if layers else 0):
            used = min(tokens, self.position - index * tokens)
            for layer in d.block_image(self.blocks[index]).reshape(layers, -1):
                for plane in np.split(layer, np.cumsum(planes)[:-1]):
                    parts.append(plane.reshape(tokens, -1)[:used].tobytes())
        return b"".join(parts)
