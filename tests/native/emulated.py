"""CUDA sources as programs of the host: kernels as they are, without what is an instruction of the
device, which native/tests/emulated/ stands in for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.native.objects import ROOT, build_module

# A small function at the level of a namespace, from its first line to the brace that ends it.
_FUNCTION = re.compile(r"^(?:template [^\n]*\n)?__device__ [^\n;]*\{\n(?:.*\n)*?\}\n", re.M)
_FENCE = re.compile(r'asm volatile\("[^"]*" ::: "memory"\);')


def without_instructions(text: str) -> str:
    """Small functions that hold assembly are gone; so are fences in kernels."""
    text = _FUNCTION.sub(lambda f: "" if re.search(r"\basm\b", f.group()) else f.group(), text)
    return _FENCE.sub("", text)


def build(test: str, kernels: list[str], folder: Path) -> Path:
    """Compile native/tests/TEST.cc with kernel files of native/cuda into a program in `folder`."""
    for path in (ROOT / "native").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cu"):
            to = folder / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            cuda = path.suffix in (".cuh", ".cu")
            text = path.read_text(encoding="utf-8")
            to.write_text(without_instructions(text) if cuda else text, encoding="utf-8")
    native = folder / "native"
    sources = [native / "tests" / f"{test}.cc"]
    sources[0].write_text((ROOT / f"native/tests/{test}.cc").read_text(encoding="utf-8"))
    for kernel in kernels:
        source = native / "cuda" / f"{kernel}.host.cc"
        # Shared memory is what a kernel declares as `extern`.
        source.write_text(
            f'#include "{native / "cuda" / kernel}.cu"\n'
            "namespace ksl {\nnamespace {\nalignas(1024) uint8_t memory[kSmallRoom];\n}\n}\n"
        )
        sources.append(source)
    program = folder / test
    flags = ["-O1", "-std=c++17", "-fno-strict-aliasing", "-w"]
    include = [
        f"-I{native / 'tests/emulated'}",
        f"-I{native / 'common'}",
        f"-I{native / 'include'}",
    ]
    command = [
        *build_module()._compiler(),
        *flags,
        *include,
        *map(str, sources),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return program
