"""Kernels of one wave, by Nsight Compute: how often, how long, how many bytes.

`cells(...)` runs `python -m bench.ncu MODEL WEIGHTS KV STREAMS CONTEXT` under `ncu`; that program
opens the engine, lets its decode graph be captured and marks one wave. Kernels are measured one
after the other, so their sum is more than a wave, in which each begins while the one before ends.
"""

from __future__ import annotations

import asyncio
import csv
import ctypes
import io
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from bench.decode import opened
from kslserve.engine.types import Row, RowKind
from kslserve.selftest.waves import Waves

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
    "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3,
}  # fmt: skip
WARM_UP = 6
ANONYMOUS = re.compile(r"(<unnamed>|\(anonymous namespace\))::")


@dataclass(slots=True)
class Kernel:
    """All launches of one kernel in a wave. seconds and bytes: in sum."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0


def kernels(model: str, weights: str, kv: str, streams: int, context: int) -> list[Kernel]:
    """Kernels of one decode wave, those that take most first; none where ncu is missing or may not
    read the counters."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return []
    command = [
        ncu, "--csv", "--metrics", f"{TIME},{READ},{WRITTEN}", "--clock-control", "none",
        "--profile-from-start", "off", "--print-units", "base",
        sys.executable, "-m", "bench.ncu", model, weights, kv, str(streams), str(context),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if done.returncode or not heads:
        print(f"ncu: {(done.stderr or done.stdout).strip()[-300:]}", flush=True)
        return []
    return read("\n".join(lines[heads[0] :]))


def read(text: str) -> list[Kernel]:
    """The kernels of ncu's CSV: a line per launch and metric."""
    found: dict[str, Kernel] = {}
    for row in csv.DictReader(io.StringIO(text)):
        plain = ANONYMOUS.sub("", row["Kernel Name"]).removeprefix("void ")
        name = re.split(r"[<(]", plain)[0].split("::")[-1]
        kernel = found.setdefault(name, Kernel(name))
        value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        if row["Metric Name"] == TIME:
            kernel.calls += 1
            kernel.seconds += value
        else:
            kernel.bytes += value
    return sorted(found.values(), key=lambda k: -k.seconds)


async def marked(model: str, weights: str, kv: str, streams: int, context: int) -> None:
    engine = opened(model, weights, kv, streams, context + WARM_UP + 1, 64)
    waves = Waves(engine)
    await waves.begin(range(streams))
    driver = ctypes.CDLL("libcuda.so.1")
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            driver.cuProfilerStart()
        tokens = [11] if step == 0 else [-1]
        await waves.run(
            rows=[Row(RowKind.LAST, s, s, context + step, 1, tokens) for s in range(streams)]
        )
    driver.cuProfilerStop()
    engine.close()


if __name__ == "__main__":
    model, weights, kv, streams, context = sys.argv[1:]
    asyncio.run(marked(model, weights, kv, int(streams), int(context)))
