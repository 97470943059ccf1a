"""compute-sanitizer over waves that launch every kernel once, and over a ring like theirs in which
a wait is left out: what racecheck would say of such a fault.

It sees what warps of a block do to each other in shared memory, bulk copies included, where each
reader arrives at the barrier of a stage by itself. Where one lane arrives for its warp it takes a
ring that comes round for a race (`lane`), so that it cannot tell which one is, and so it does in
clusters (tests/device/races.py). It sees nothing of device memory, neither between blocks nor
between kernels (`across`). What rings of products and attention wait for is therefore also run on
the host, where copies come as early or as late as they may (native/tests/emulated).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kslserve.engine.cuda import CudaLibrary
from tests.device.races import DISASSEMBLER, findings, functions, mangled
from tests.device.sanitized import MODELS, PROGRAM, ROOT, TOOLS, under

RACE = """
========= Error: Race reported between {} access at void ksl::<unnamed>::{}<(int)4, (bool)0>(A)+0x{}
=========     and {} access at void ksl::<unnamed>::{}<(int)4, (bool)0>(A)+0x{} [1984 hazards]
=========     and Read access at void ksl::<unnamed>::wide<(int)4, (bool)0>(A)+0x20 [8 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INVALID = """
========= Invalid __global__ read of size 4 bytes
=========     at ksl::<unnamed>::embed_kernel(Raw, const int *)+0x100
========= ERROR SUMMARY: 1 error
"""
CODE = """
		Function : _ZN3ksl1_4wideILi4ELb0EEEvA
        /*0010*/                   LDS.U16 R7, [R7+0x800] ;                     /* 0x0 */
        /*0020*/              @!P0 LDS.128 R8, [R8] ;                           /* 0x0 */
        /*0030*/                   STS [R8], R9 ;                               /* 0x0 */
        /*0040*/             @!UP0 UBLKCP.S.G [UR10], [UR6], UR4 ;              /* 0x0 */
        /*0050*/             @!UP0 UBLKCP.S.G.MULTICAST [UR4], [UR10], UR6 ;    /* 0x0 */
		Function : _ZN3ksl1_6narrowILi4ELb0EEEvA
        /*0010*/                   LDS.U16 R7, [R7+0x800] ;                     /* 0x0 */
        /*0040*/             @!UP0 UBLKCP.S.G [UR10], [UR6], UR4 ;              /* 0x0 */
"""


def instruction(kernel: str, offset: int) -> str:
    (code,) = [code for name, code in functions(CODE).items() if kernel in name]
    return code.get(offset, "")


@pytest.mark.parametrize(
    ("race", "count"),
    [
        (("Write", "wide", "40", "Read", "wide", "10"), 0),  # a refill
        (("Write", "wide", "30", "Read", "wide", "10"), 1),  # a store
        (("Write", "wide", "50", "Read", "wide", "10"), 1),  # a copy to several blocks
        (("Write", "wide", "40", "Write", "wide", "30"), 1),  # a store beside a refill
        (("Write", "wide", "40", "Read", "wide", "30"), 1),
        (("Read", "wide", "10", "Read", "wide", "10"), 1),
        (("Write", "wide", "44", "Read", "wide", "10"), 1),  # nothing is known of it
        (("Write", "narrow", "40", "Read", "narrow", "10"), 1),
    ],
)
def test_what_is_a_race(race: tuple[str, ...], count: int) -> None:
    assert len(findings(RACE.format(*race), instruction)) == count


def test_what_is_a_finding() -> None:
    assert len(findings(INVALID, instruction)) == 1
    assert findings("any sizes: 0.3 s\n========= ERROR SUMMARY: 0 errors\n", instruction) == []
    assert mangled("wide8", "(int)64, (bool)1") == "5wide8ILi64ELb1EE"


@pytest.mark.cuda
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(cuda: CudaLibrary, tool: str, model: str) -> None:
    for program in (PROGRAM, DISASSEMBLER):
        found(program)
    assert f"{model}: " in under(tool, model)


@pytest.fixture(scope="module")
def races(cuda: CudaLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of native/tests/races.cu."""
    compiler, program = found("nvcc"), tmp_path_factory.mktemp("races") / "races"
    source = ROOT / "native/tests/races.cu"
    command = [compiler, "-std=c++17", "-O3", "-arch=sm_90a", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("none", False),
        ("stored", True),
        ("copied", True),
        ("unwaited", True),
        ("refilled", True),
        ("across", False),
        ("lane", True),
        ("lane-refilled", True),
    ],
)
def test_a_race_is_seen(races: Path, fault: str, seen: bool) -> None:
    """seen: whether racecheck reports one, which it should not of `none` and `lane`."""
    command = [found(PROGRAM), "--tool", "racecheck", str(races), fault]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RACECHECK SUMMARY: " in done.stdout
    assert bool(findings(done.stdout, lambda *_: "")) == seen, done.stdout


def found(program: str) -> str:
    """A program of the toolkit; the test is skipped without it."""
    path = shutil.which(program) or f"/usr/local/cuda/bin/{program}"
    if not Path(path).exists():
        pytest.skip(f"no {program}")
    return path
