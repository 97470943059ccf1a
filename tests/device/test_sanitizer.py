"""compute-sanitizer over waves that launch every kernel once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kslserve.engine.cuda import CudaLibrary
from tests.device.races import DISASSEMBLER, findings, functions, mangled
from tests.device.sanitized import PROGRAM, TOOLS, under

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
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(cuda: CudaLibrary, tool: str) -> None:
    for program in (PROGRAM, DISASSEMBLER):
        if not (shutil.which(program) or Path("/usr/local/cuda/bin", program).exists()):
            pytest.skip(f"no {program}")
    assert "portable: " in under(tool)
