"""What compute-sanitizer reports, without the reports that are none: told by the instructions that
they are about."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

DISASSEMBLER = "cuobjdump"
# Kernels of wide products run in clusters. There racecheck takes the bulk copies that refill the
# ring of weights for unordered with those who read it, although a copy waits for the barrier at
# which all readers have arrived; the same in kernels without clusters it understands. What is
# excused is such a copy, not to several blocks, beside loads from shared memory, by their
# instructions; any other pair in these kernels is a race.
CLUSTERED = ("wide", "wide8")
COPY, LOAD = "UBLKCP.S.G ", "LDS"
REPORT = re.compile(
    r"Race reported between (\w+) access at \w+ ksl::<unnamed>::(\w+)<(.+?)>\(.*\)\+0x(\w+)\n"
    r"((?:=+ +and .*\n?)+)"
)
OTHER = re.compile(r"and (\w+) access at .*\+0x(\w+) \[")


def findings(text: str, instruction: Callable[[str, int], str]) -> list[str]:
    """Errors and hazards in what a tool printed, but those that are none. instruction: of a kernel,
    by (part of its mangled name, offset)."""
    excused = set()
    for report in REPORT.finditer(text):
        kind, name, arguments, offset, others = report.groups()
        kernel = mangled(name, arguments)
        pairs = OTHER.findall(others)
        if (
            name in CLUSTERED
            and kind == "Write"
            and COPY in instruction(kernel, int(offset, 16))
            and all(
                kind == "Read" and LOAD in instruction(kernel, int(at, 16)) for kind, at in pairs
            )
            and len(pairs) == others.count(" access at ")
        ):
            excused.add(report.start())
    errors = re.finditer(
        r"^={9} (?:Error|Invalid|Program hit|Warning|Uninit).*$", text, re.MULTILINE
    )
    return [e[0] for e in errors if not any(e.start() <= at < e.end() for at in excused)]


def mangled(name: str, arguments: str) -> str:
    """Of a kernel template: `wide`, `(int)4, (bool)0` -> `4wideILi4ELb0EE`."""
    values = re.findall(r"\((int|bool)\)(\d+)", arguments)
    text = "".join(f"L{kind[0]}{value}E" for kind, value in values)
    return f"{len(name)}{name}I{text}E"


class Code:
    """The kernels of a library for sm_90a, disassembled when they are first asked for."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def at(self, kernel: str, offset: int) -> str:
        """An instruction; empty where it is not there, or not the only one."""
        known = [
            code[offset]
            for name, code in self._functions.items()
            if kernel in name and offset in code
        ]
        return known[0] if len(known) == 1 else ""

    @cached_property
    def _functions(self) -> dict[str, dict[int, str]]:
        program = shutil.which(DISASSEMBLER) or f"/usr/local/cuda/bin/{DISASSEMBLER}"
        command = [program, "-sass", "-arch", "sm_90a", str(self._library)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return functions(done.stdout)


def functions(disassembly: str) -> dict[str, dict[int, str]]:
    """Instructions by mangled name and offset."""
    found: dict[str, dict[int, str]] = {}
    code: dict[int, str] = {}
    for line in disassembly.splitlines():
        if head := re.search(r"Function : (\S+)", line):
            code = found.setdefault(head[1], {})
        elif part := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            code[int(part[1], 16)] = part[2]
    return found
