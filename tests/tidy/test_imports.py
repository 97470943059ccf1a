"""Imports go one way. The table below is the whole truth of which package may use which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kslserve"

LEVEL0 = {"errors", "log", "config", "metrics", "heap", "core"}
# Package (or module) to what it may import besides itself. A dotted entry allows that module alone.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "metrics": set(),
    "heap": set(),
    "setting": {"errors"},
    "config": {"errors", "setting"},
    "core": {"errors"},
    "text": LEVEL0,
    "parse": LEVEL0,
    "engine": LEVEL0,
    "http": LEVEL0 - {"core"},
    "ksl": LEVEL0 | {"engine.codecs", "engine.model"},
    "sched": LEVEL0 | {"engine.types"},
    "service": LEVEL0 | {"text", "parse", "sched", "engine.types"},
    "api": LEVEL0 | {"http.message", "http.sse", "http.router", "service"},
    "watchdog": LEVEL0,
    "selftest": LEVEL0 | {"engine", "ksl"},
    "startup": {"*"},
    "app": {"*"},
    "cli": {"*"},
    "__main__": {"cli"},
    "__init__": {"engine.abi"},
}
EXTERNAL_ALLOWED = {
    "_kslserve": {"engine", "__init__"},
    "cffi": set(),
    "jinja2": {"text"},
    "tokenizers": {"text"},
    "httptools": {"http"},
    "llguidance": {"service"},
    "uvloop": {"app"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever in the file; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def allowed(unit: str, target: str) -> bool:
    """target: dotted path below the package, such as `engine.types.Row`."""
    rules = ALLOWED[unit]
    if "*" in rules or target.split(".")[0] == unit:
        return True
    parts = target.split(".")
    return any(".".join(parts[:n]) in rules for n in range(1, len(parts) + 1))


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    unit = unit_of(path)
    assert unit in ALLOWED, f"{unit} is not in the table of this test"
    for line, module in imports_of(path):
        first, _, rest = module.partition(".")
        where = f"{path.relative_to(ROOT)}:{line}"
        if first == "kslserve" and rest and rest != "__version__":
            assert allowed(unit, rest), f"{where}: {unit} must not import {module}"
        if first in EXTERNAL_ALLOWED:
            assert unit in EXTERNAL_ALLOWED[first], f"{where}: {unit} must not import {first}"


def test_native_includes_go_one_way() -> None:
    """cpu/ includes common/ and itself, common/ only itself; abi.cc is where they meet."""
    for path in sorted((ROOT / "native").rglob("*")):
        if path.suffix not in (".h", ".cc", ".inl", ".cu", ".cuh") or "tests" in path.parts:
            continue
        folder = path.relative_to(ROOT / "native").parts[0]
        for target in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
            reached = (path.parent / target).resolve()
            assert reached.is_file(), f"{path.name} includes {target}, which is not there"
            into = reached.relative_to(ROOT / "native").parts[0]
            meets = path.name == "abi.cc" and folder == "common"
            fine = into in (folder, "common", "include") or meets
            assert fine, f"{path.relative_to(ROOT)} includes {target}"
