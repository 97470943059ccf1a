"""Runs the C++ kernel test on every instruction set the machine has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.kernels import Program
from tests.native.objects import ROOT, kernel_sources, link


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kernels") / "test_kernels"
    return link(ROOT / "native/tests/test_kernels.cc", kernel_sources(), target)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_kernels_agree_with_references(program: Path, isa: str) -> None:
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert listed[0] == "scalar"
    if isa not in listed:
        pytest.skip(f"this machine has no {isa}")
    for seed in range(1, 4):
        done = subprocess.run(
            [program, isa, str(seed)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_an_unknown_table_is_refused(program: Path) -> None:
    done = subprocess.run([program, "sse9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "no table named sse9 here\n"


def test_the_bench_program_calls_the_kernels_as_they_are() -> None:
    with Program(threads=1) as bench:
        assert bench.ask("name") in ("scalar", "avx2", "avx512")
        for request in ("gemm int 3 32 128 40", "quantize 64 2", "scan 2 16 16 1"):
            assert float(bench.ask(request)) > 0
