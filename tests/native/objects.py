"""Compiles native sources for the C++ tests with the flags of build.py.

Objects go to build/test/, named after a digest of everything they are made from, so a second run
takes them from there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import types
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test"


@cache
def build_module() -> types.ModuleType:
    """build.py, by path: its name may also be that of an installed package."""
    spec = importlib.util.spec_from_file_location("kslserve_build", ROOT / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_sources() -> list[Path]:
    """The sources of the kernel tables and all they need."""
    build = build_module()
    folder = ROOT / "native/cpu"
    names = ["pack", "dispatch", "isa_scalar", *sorted(build.ISA_FLAGS)]
    common = [ROOT / "native/common" / name for name in ("codec.cc", "kv_row.cc")]
    sources = [folder / f"{name}.cc" for name in names] + common
    available = set(build._sources())
    return [source for source in sources if source in available]


@cache
def compile_object(source: Path) -> Path:
    """The object of one source, with the flags that the extension gets."""
    build = build_module()
    command = [*build._compiler(), *build.COMMON_FLAGS, *build.ISA_FLAGS.get(source.stem, [])]
    digest = hashlib.sha256("\0".join([build._headers_digest(), *command]).encode())
    digest.update(source.read_bytes())
    target = FOLDER / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    if not target.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        for old in FOLDER.glob(f"{source.stem}-*.o"):
            old.unlink(missing_ok=True)
        scratch = target.with_suffix(".tmp")
        subprocess.run([*command, "-c", str(source), "-o", str(scratch)], check=True)
        scratch.replace(target)
    return target


def link(test: Path, sources: list[Path], target: Path) -> Path:
    """A program of one test source and the objects of `sources`."""
    build = build_module()
    objects = [compile_object(source) for source in sources]
    flags = ["-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS]
    subprocess.run(
        [*build._compiler(), *flags, str(test), *map(str, objects), "-o", str(target)], check=True
    )
    return target
