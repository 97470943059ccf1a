"""Objects compiled for one instruction set must not share code with the rest of the library.

A weak symbol (an inline function or template of a header) is kept once by the linker; if the copy
came from an AVX-512 object, every machine would run it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.objects import compile_object, kernel_sources


def symbols(source: Path) -> list[tuple[str, str]]:
    """(type letter of nm, name) of every symbol of the object."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("there is no nm here")
    done = subprocess.run(
        [nm, str(compile_object(source))], capture_output=True, text=True, check=True
    )
    return [(line.split()[-2], line.split()[-1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "source", [s for s in kernel_sources() if s.stem.startswith("isa_")], ids=lambda s: s.stem
)
def test_only_the_table_is_exported(source: Path) -> None:
    found = symbols(source)
    weak = [name for kind, name in found if kind in "WwVvu"]
    assert weak == []
    exported = [name for kind, name in found if kind.isupper() and kind != "U"]
    assert len(exported) == 1
    assert re.search(rf"kernels_{source.stem.removeprefix('isa_')}E?$", exported[0])


@pytest.mark.parametrize(
    "source", [s for s in kernel_sources() if s.stem.startswith("isa_")], ids=lambda s: s.stem
)
def test_nothing_but_memory_functions_is_called(source: Path) -> None:
    undefined = {name.lstrip("_") for kind, name in symbols(source) if kind == "U"}
    assert undefined <= {"memcpy", "memmove", "memset", "stack_chk_fail", "GLOBAL_OFFSET_TABLE_"}


def test_a_weak_symbol_would_be_seen(tmp_path: Path) -> None:
    source = tmp_path / "isa_weak.cc"
    source.write_text("inline int shared(int x) { return x + 1; }\nint (*use)(int) = shared;\n")
    assert any(kind in "WwVvu" for kind, _ in symbols(source))
