"""The CUDA backend in one run: built, proven, then timed.

    python -m bench.device [--build ARCH,...] [options of bench.decode] [--save]

--build compiles the library for these architectures first, into build/; without it the one that is
installed is taken. Then the device tests run (`tests/device`, without the sanitizer's). Nothing is
timed unless all pass: exit status 1. What they found is printed and stored beside the figures of
`bench.decode`, which follow, the read bandwidth first.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from bench.report import ROOT, Report

SUITE = ("tests/device", "--ignore=tests/device/test_sanitizer.py")


def build(arches: str) -> None:
    command = [sys.executable, "build.py", "cuda", "build", "--arch", arches]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit("bench.device: the library was not built.")


def prove(report: Report, suite: Sequence[str] = SUITE) -> bool:
    """Whether tests ran and none failed; a skipped one proves nothing."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={out}", *suite]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if not out.exists():
            print(done.stdout[-3000:], done.stderr[-3000:])
            raise SystemExit("bench.device: the tests did not run.")
        totals = ElementTree.parse(out).getroot()[0].attrib
    wrong = int(totals["failures"]) + int(totals["errors"])
    skipped = int(totals["skipped"])
    passed = int(totals["tests"]) - wrong - skipped
    if wrong:
        print(done.stdout[-3000:])
    report.add(
        "parity", passed=passed, wrong=wrong, skipped=skipped, seconds=time.monotonic() - begun
    )
    return passed > 0 and wrong == 0 and done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--build", metavar="ARCH,...", help="such as sm_90a")
    options, rest = parser.parse_known_args()
    if options.build:
        build(options.build)
    from bench import decode  # of what was just built

    parser = argparse.ArgumentParser(description=decode.__doc__)
    decode.add_arguments(parser)
    wanted = parser.parse_args(rest)
    report = Report("device")
    right = prove(report)
    if right:
        asyncio.run(decode.bench(wanted, report))
    else:
        print("bench.device: not timed, since the tests did not pass.", flush=True)
    report.write(wanted.save)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
