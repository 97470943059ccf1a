"""Struct layouts of the bridge against the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from _kslserve import ffi, lib

from kslserve.engine import marshal


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
    assert marshal.unpack_row(record, lib).tokens == (0, 1, 2)
    done.n_tokens = 17
    record = marshal.DONE.unpack(ffi.buffer(done))
    assert marshal.unpack_row(record, lib).tokens == tuple(range(17))
