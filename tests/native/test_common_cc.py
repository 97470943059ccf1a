"""Builds and runs the C++ tests of native/common with a fake backend; under the address and
undefined-behaviour sanitizers where the compiler has them, so that a leak is a failure too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.objects import ROOT, build_module

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
STAMP = ['-DKSL_ABI_HASH="hash"', '-DKSL_VERSION="0"', '-DKSL_SOURCE_DIGEST="digest"']


def flags() -> list[str]:
    return ["-O1" if flag == "-O3" else flag for flag in build_module().COMMON_FLAGS]


def sanitizers(folder: Path) -> list[str]:
    """The sanitizer flags if a program made with them runs here."""
    source = folder / "empty.cc"
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    program = folder / "empty"
    command = [*build_module()._compiler(), *SANITIZERS, str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    works = made and subprocess.run([program], capture_output=True, check=False).returncode == 0
    return SANITIZERS if works else []


def test_common(tmp_path: Path) -> None:
    program = tmp_path / "test_common"
    sources = sorted((ROOT / "native/common").glob("*.cc"))
    assert sources
    subprocess.run(
        [
            *build_module()._compiler(),
            *flags(),
            *sanitizers(tmp_path),
            *STAMP,
            str(ROOT / "native/tests/test_common.cc"),
            *map(str, sources),
            "-o",
            str(program),
        ],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr)
    assert done.stdout.endswith(" 0 failures\n")
