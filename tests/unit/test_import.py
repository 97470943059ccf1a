"""`import kslserve` says in one sentence that the native module is missing or stale."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import _kslserve
import pytest

import kslserve

PACKAGE = Path(kslserve.__file__).parent
FAKE = """
class ffi:
    string = staticmethod(lambda text: text)
class lib:
    ksl_version = staticmethod(lambda: {version!r})
    ksl_abi_hash = staticmethod(lambda: {header!r})
    ksl_source_digest = staticmethod(lambda: {digest!r})
"""


def installed(root: Path) -> dict[str, str]:
    ffi, lib = _kslserve.ffi, _kslserve.lib
    return {
        "version": ffi.string(lib.ksl_version()),
        "header": ffi.string(lib.ksl_abi_hash()),
        "digest": ffi.string(lib.ksl_source_digest()),
    }


def try_import(folder: Path) -> str:
    """The last line of standard error of a process that imports the package from `folder`."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import kslserve"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=False
    )
    return done.stderr.strip().rpartition("\n")[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The package's import-time part alone, without any native module on the path."""
    for name in ("__init__.py", "engine/__init__.py", "engine/abi.py"):
        target = tmp_path / "kslserve" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, target)
    return tmp_path


def test_missing(folder: Path) -> None:
    assert try_import(folder) == "ImportError: not installed: run `pip install .`"


def test_matching(folder: Path) -> None:
    (folder / "_kslserve.py").write_text(FAKE.format(**installed(folder)))
    assert try_import(folder) == ""


@pytest.mark.parametrize("part", ["version", "header"])
def test_other_build(folder: Path, part: str) -> None:
    values = {**installed(folder), part: b"other"}
    (folder / "_kslserve.py").write_text(FAKE.format(**values))
    assert try_import(folder) == ("ImportError: reinstall: native module is older than the sources")


def test_edited_sources(folder: Path) -> None:
    """In a clone the native sources lie beside the package and are compared too."""
    (folder / "_kslserve.py").write_text(FAKE.format(**installed(folder)))
    header = folder / "native/include/ksl.h"
    header.parent.mkdir(parents=True)
    header.write_text("/* edited */")
    assert try_import(folder) == ("ImportError: reinstall: native module is older than the sources")


def test_module_without_the_functions(folder: Path) -> None:
    (folder / "_kslserve.py").write_text("class ffi: pass\nclass lib: pass\n")
    assert try_import(folder) == ("ImportError: reinstall: native module is older than the sources")


def test_broken_module_keeps_its_reason(folder: Path) -> None:
    (folder / "_kslserve.py").write_text("raise ImportError('libfoo.so: cannot open')\n")
    assert try_import(folder) == "ImportError: libfoo.so: cannot open"
