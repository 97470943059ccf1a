"""compute-sanitizer over waves that launch every kernel once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kslserve.engine.cuda import CudaLibrary
from tests.device.sanitized import PROGRAM, TOOLS, findings, under

RACE = """
========= Error: Race reported between Write access at void ksl::<unnamed>::{}<(int)4>(A)+0x5310
=========     and Read access at void ksl::<unnamed>::{}<(int)4>(A)+0x590 [1984 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INVALID = """
========= Invalid __global__ read of size 4 bytes
=========     at ksl::<unnamed>::embed_kernel(Raw, const int *)+0x100
========= ERROR SUMMARY: 1 error
"""


def test_what_is_a_finding() -> None:
    for kernel, count in (("wide", 0), ("wide8", 0), ("widest", 1), ("flash_kernel", 1)):
        assert len(findings(RACE.format(kernel, kernel))) == count, kernel
    assert len(findings(INVALID)) == 1
    assert findings("any sizes: 0.3 s\n========= ERROR SUMMARY: 0 errors\n") == []


@pytest.mark.cuda
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(cuda: CudaLibrary, tool: str) -> None:
    if not (shutil.which(PROGRAM) or Path("/usr/local/cuda/bin", PROGRAM).exists()):
        pytest.skip(f"no {PROGRAM}")
    assert "portable: " in under(tool)
