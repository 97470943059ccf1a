"""Struct layouts of the bridge against the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _kslserve import ffi, lib
from hypothesis import given
from hypothesis import strategies as st

from kslserve.engine import marshal, records
from kslserve.engine.types import Done, Row, RowKind, TableEdit, Wave
from kslserve.errors import EngineError


def test_layouts_fit_the_library() -> None:
    marshal.check_sizes(ffi, lib)
    assert lib.ksl_sizeof(b"no such struct") == 0


@pytest.mark.parametrize("name", [*marshal.LAYOUTS, "ksl_logprob", "ksl_sampling", "ksl_config"])
def test_a_struct_of_another_size_is_an_import_error(name: str) -> None:
    def other(asked: bytes) -> Any:
        return lib.ksl_sizeof(asked) + 8 * (asked.decode() == name)

    with pytest.raises(ImportError, match=f"reinstall kslserve: struct {name} "):
        marshal.check_sizes(ffi, SimpleNamespace(ksl_sizeof=other))


def test_field_order_of_structs() -> None:
    """Every field of the packed structs is where cffi has it."""
    fields = {
        "ksl_row": [
            *("kind", "slot", "slab", "draft", "start", "n", "tokens", "propose"),
            *("n_cuts", "top_n"),
        ],
        "ksl_op": ["kind", "a", "b", "n"],
        "ksl_edit": ["slot", "start", "n", "offset"],
    }
    for name, ints in fields.items():
        memory = bytearray(marshal.LAYOUTS[name].size)
        count = len(marshal.LAYOUTS[name].unpack(memory))
        marshal.LAYOUTS[name].pack_into(memory, 0, *range(1, count + 1))
        struct = ffi.cast(f"{name} *", ffi.from_buffer(memory))
        assert [getattr(struct, field) for field in ints] == list(range(1, len(ints) + 1))
    done = ffi.new("ksl_done *")
    done.wave, done.row, done.flags, done.n_tokens, done.ended_ns = 7, 1, 8, 3, 99
    done.tokens, done.drafts, done.drafts_ns = list(range(17)), list(range(50, 66)), 5
    record = marshal.DONE.unpack(ffi.buffer(done))
    assert (record[0], record[1], record[4], record[8], *record[15:]) == (7, 1, 8, 3, 99, 5)
    assert marshal.IDS.unpack(record[11]) == tuple(range(50, 66))
    assert records.unpack_row(record, lib).tokens == (0, 1, 2)
    done.n_tokens = 17
    record = marshal.DONE.unpack(ffi.buffer(done))
    assert records.unpack_row(record, lib).tokens == tuple(range(17))


# ------------------------------------------------------------ rows that stand


def packed(packer: marshal.WavePacker, wave: Wave) -> tuple[bytes, list[bytes], list[int]]:
    """What the library would copy of a wave: its header without addresses, rows, tokens."""
    struct = packer.pack(wave)[0]
    rows = [bytes(ffi.buffer(struct.rows + i)) for i in range(struct.n_rows)]
    return (
        bytes(ffi.buffer(struct, 40)),
        rows,
        [struct.tokens[i] for i in range(struct.n_tokens)],
    )


def new_packer() -> marshal.WavePacker:
    return marshal.WavePacker(ffi, vocab=64, tap_width=64, rows=8, columns=32)


@given(st.lists(st.integers(1, 5), min_size=3, max_size=6), st.data())
def test_rows_that_stand_are_packed_like_new_ones(kinds: list[int], data: st.DataObject) -> None:
    """Whatever is moved, and whatever else comes between: edits, other rows."""
    packer = new_packer()
    rows = [Row(RowKind.LAST, i, i + 1, 10 * i, 1, [i]) for i in range(3)]
    same = False
    for number, kind in enumerate(kinds, start=1):
        if kind == 5:
            rows, same = [Row(RowKind.PREFILL, 0, 0, 0, 3, []), *rows[:2]], False
        for row in rows:
            row.start += 1
            row.tokens = data.draw(st.lists(st.integers(-1, 63), min_size=row.n, max_size=row.n))
        wave = Wave(number, rows, same_rows=same)
        if kind == 4:
            wave.edits = [TableEdit(1, 2, [3, 4])]
        assert packed(packer, wave) == packed(new_packer(), wave)
        same = True


def test_a_moved_row_that_no_struct_can_hold_is_refused_and_packed_anew() -> None:
    packer = new_packer()
    row = Row(RowKind.LAST, 0, 0, 5, 1, [1])
    rows = [row]
    packer.pack(Wave(1, rows))
    for start, tokens in ((1 << 40, [1]), (5, [1 << 40]), (5, [1, 2])):
        row.start, row.tokens = start, tokens
        with pytest.raises(EngineError, match="Invalid wave"):
            packer.pack(Wave(2, rows, same_rows=True))
        row.start, row.tokens = 6, [7]
        wave = Wave(3, rows, same_rows=True)
        assert packed(packer, wave) == packed(new_packer(), wave)


# ------------------------------------------------------------ reading records

RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "flags": st.sampled_from([0, 0, 0, 1, 2, 4, 16]),
            "accepted": st.sampled_from([0, 0, 0, 2]),
            "proposed": st.sampled_from([0, 0, 0, 1]),
            "n_tokens": st.sampled_from([1, 1, 1, 0, 3]),
        }
    ),
    max_size=6,
)


@given(st.lists(RECORDS, min_size=1, max_size=3), st.integers(0, 6))
def test_records_read_in_any_parts_are_the_same_waves(waves: list[Any], cut: int) -> None:
    """`sampled` says exactly what the rows say, and only where that is all."""
    structs = []
    for number, rows in enumerate(waves, start=1):
        for index, fields in enumerate(rows):
            done = ffi.new(
                "ksl_done *", {"wave": number, "row": index, "slot": 9 - index, **fields}
            )
            done.position = 100 * number + index
            done.tokens, done.drafts = list(range(index, index + 17)), list(range(16))
            structs.append(done)
        end = {"wave": number, "row": -1, "flags": lib.KSL_DONE_WAVE_END, "started_ns": number}
        structs.append(ffi.new("ksl_done *", end))
    reader = records.DoneReader(lib, 64)
    pending = {number: marshal.Pending() for number in range(1, 4)}
    read: list[Done] = []
    parts = structs[:cut], structs[cut:]
    for part in parts:
        for at, struct in enumerate(part):
            size = marshal.DONE.size
            reader.memory[at * size : (at + 1) * size] = bytes(ffi.buffer(struct))
        read += reader.read(len(part), pending)
        reader.memory[:] = bytes(len(reader.memory))  # rows are made of what was there
    assert [done.wave for done in read] == list(range(1, len(waves) + 1))
    assert [done.started_ns for done in read] == [done.wave for done in read]
    assert list(pending) == list(range(len(waves) + 1, 4))
    for done, rows in zip(read, waves, strict=True):
        plain = all(f == {"flags": 0, "accepted": 0, "proposed": 0, "n_tokens": 1} for f in rows)
        if done.sampled is not None:
            assert plain
            assert done.sampled == [row.tokens[0] for row in done.rows]
        assert [(row.slot, row.position) for row in done.rows] == [
            (9 - i, 100 * done.wave + i) for i in range(len(rows))
        ]
        assert [len(row.tokens) for row in done.rows] == [f["n_tokens"] for f in rows]
        assert [len(row.drafts) for row in done.rows] == [f["proposed"] for f in rows]
    if len(waves) == 1 and cut == 0:
        assert (read[0].sampled is not None) == all(
            f == {"flags": 0, "accepted": 0, "proposed": 0, "n_tokens": 1} for f in waves[0]
        )


def test_a_wave_with_more_to_read_is_not_read_as_tokens_only() -> None:
    reader = records.DoneReader(lib, 8)
    row = ffi.new("ksl_done *", {"wave": 1, "n_tokens": 1})
    size = marshal.DONE.size
    for status, wanted in ((lib.KSL_OK, None), (lib.KSL_FATAL, "")):
        end = {"wave": 1, "row": -1, "flags": lib.KSL_DONE_WAVE_END, "status": status}
        reader.memory[:size] = bytes(ffi.buffer(row))
        reader.memory[size : 2 * size] = bytes(ffi.buffer(ffi.new("ksl_done *", end)))
        scores = np.zeros((1, 1), marshal.LOGPROB)
        (done,) = reader.read(2, {1: marshal.Pending(logprobs={0: (scores, False)})})
        assert done.error == wanted
        assert done.sampled is None
    assert done.rows[0].tokens == (0,)
