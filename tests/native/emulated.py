"""CUDA sources as programs of the host: kernels as they are, without what is an instruction of the
device, which native/tests/emulated/ stands in for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.native.objects import ROOT, build_module

# A small function at the level of a namespace, from its first line to the brace that ends it.
_FUNCTION = re.compile(r"^(?:template [^\n]*\n)?__device__ [^{};]*\{\n(?:.*\n)*?\}\n", re.M)
_LAUNCH = re.compile(r"kernel<<<\((\w+)\), \((\w+)\), 0, [^>]*->stream>>>\(__VA_ARGS__\)")
_WAIT = re.compile(
    r"\b(?:bulk_wait|barrier_wait|cluster_began|copy_wait<\d>|named_barrier|meet|__syncthreads)"
    r"\((?!int )"
)
_FENCE = re.compile(r'asm volatile\("[^"]*" ::: "memory"\);')
_SHARED = re.compile(r"extern __shared__ __align__\((\d+)\) (\w+) (\w+)\[\];")
_HINT = re.compile(r'asm volatile\("prefetch[^"]*"[^;]*\);')
_BARRIER = re.compile(r'asm volatile\("bar\.sync (\d), %0;" ::"r"\((.*?)\) : "memory"\);')


def without_instructions(text: str) -> str:
    """Small functions that hold assembly are gone; so are fences and hints in kernels. Barriers of
    some warps and launches are calls; so is the shared memory of a launch, see `dynamic`."""
    text = _HINT.sub(";", _BARRIER.sub(r"named_barrier(\1, \2);", text))
    text = _FUNCTION.sub(lambda f: "" if re.search(r"\basm\b", f.group()) else f.group(), text)
    text = _SHARED.sub(r"\2 *const \3 = emulated::dynamic(\1);", _FENCE.sub("", text))
    return _LAUNCH.sub(r"emulated::launch(dim3(\1), dim3(\2), kernel, __VA_ARGS__)", text)


def build(test: str, kernels: list[str], folder: Path) -> Path:
    """Compile native/tests/TEST.cc with kernel files of native/cuda into a program in `folder`. The
    waits in files beside those are numbered; `waits.txt` there has a line for each."""
    waits: list[str] = []

    def number(path: Path, text: str) -> str:
        def one(found: re.Match[str]) -> str:
            line = text.count("\n", 0, found.start()) + 1
            waits.append(f"{path.name}: {text.splitlines()[line - 1].strip()}")
            return f"if (emulated::there({len(waits) - 1})) {found[0]}"

        return _WAIT.sub(one, text)

    own = {(ROOT / f"native/cuda/{kernel}.cu") for kernel in kernels}
    beside = {path.parent for path in own}
    for path in sorted((ROOT / "native").rglob("*")):
        if path.suffix in (".h", ".cuh", ".cu"):
            to = folder / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            cuda = path.suffix in (".cuh", ".cu")
            text = path.read_text(encoding="utf-8")
            if cuda:
                text = without_instructions(text)
            if path in own or (path.suffix == ".cuh" and path.parent in beside):
                text = number(path, text)
            to.write_text(text, encoding="utf-8")
    (folder / "waits.txt").write_text("\n".join(waits), encoding="utf-8")
    native = folder / "native"
    sources = [native / "tests" / f"{test}.cc"]
    sources[0].write_text((ROOT / f"native/tests/{test}.cc").read_text(encoding="utf-8"))
    for kernel in kernels:
        source = native / "cuda" / f"{kernel}.host.cc"
        source.write_text(f'#include "{native / "cuda" / kernel}.cu"\n')
        sources.append(source)
    program = folder / test
    flags = [
        "-O1",
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fno-pie",
        "-no-pie",
        "-w",
        "-include",
        "cuda_runtime.h",
    ]
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
