"""What an engine of the CPU backend takes of the machine, beside what its plan says.

    python -m bench.memory [--models ksl-nano,synth:0.8b] [--context 4096] [--sequences 2]
                           [--kv bf16] [--save]

Each model is opened in a process of its own with the sizes that the server would choose. One
sequence computes a prompt and decodes to the end of its context; the blocks and slabs of all others
are filled by copies. `ratio` is the growth of the process at its peak (VmHWM, from before the
engine was opened) over the plan's total; its target is within 10 %. `idle`: what is left when all
slabs and blocks were dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Report
from kslserve import heap
from kslserve.config import Settings
from kslserve.engine.budget import kv_token_bytes, slot_bytes
from kslserve.engine.codecs import encoded_bytes
from kslserve.engine.native import NativeEngine, kv_code_bytes
from kslserve.engine.types import OpKind, Row, RowKind, StateOp
from kslserve.ksl.open import open_model
from kslserve.selftest.waves import Waves
from kslserve.startup.pools import (
    free_memory_bytes,
    kv_format,
    plan_pools,
    slab_bytes,
    workspace_bytes,
)

DECODED = 16
TARGET = 0.1


def status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not tell {name}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


async def fill(waves: Waves) -> None:
    """A prompt and decode up to the end of a context, and copies into everything else."""
    info = waves.engine.info
    await waves.begin([0])
    positions = info.blocks_per_slot * info.block_tokens
    ids = np.arange(positions, dtype=np.int32) % 1000 + 5
    prompt, at = positions - DECODED, 0
    while at < prompt:
        n = min(info.wave_columns, prompt - at)
        kind = RowKind.LAST if at + n == prompt else RowKind.PREFILL
        await waves.run(rows=[Row(kind, 0, 0, at, n, ids[at : at + n])])
        at += n
    for position in range(prompt, positions):
        await waves.run(rows=[Row(RowKind.LAST, 0, 0, position, 1, [-1])])
    per_slot = info.blocks_per_slot
    for block in range(per_slot, info.blocks):
        await waves.run(before=[StateOp(OpKind.COPY_BLOCK, block % per_slot, block)])
    for slab in range(1, info.slabs):
        await waves.run(before=[StateOp(OpKind.COPY_SLAB, 0, slab)])


async def measure(model_name: str, settings: Settings) -> dict[str, Any]:
    """Bytes planned, by part; told by the open engine; and taken: when it was open, at the peak,
    and after a drop of all slabs and blocks."""
    with open_model(model_name) as model:
        weights = encoded_bytes(model.tensors)
        codes = kv_code_bytes(model.spec, kv_format(settings))
        plan = plan_pools(settings, model.spec, free_memory_bytes() - weights, codes)
        sizes, spec = plan.sizes, model.spec
        token = kv_token_bytes(spec, kv_format(settings)) + codes
        forget_peak()
        before = status("VmRSS")
        engine = NativeEngine.open(
            spec, model.tensors, sizes, kv_format=kv_format(settings), threads=settings.threads
        )
    opened = status("VmHWM") - before
    gc.collect()
    heap.trim()
    waves = Waves(engine)
    await fill(waves)
    peak = status("VmHWM") - before
    drops = [StateOp(OpKind.DROP_SLABS, 0, sizes.slabs)]
    await waves.run(before=[*drops, StateOp(OpKind.DROP_BLOCKS, 0, sizes.blocks)])
    idle = status("VmRSS") - before
    info = engine.info
    parts = {
        "weights": weights,
        "kv": sizes.blocks * sizes.block_tokens * token,
        "slabs": sizes.slots * slab_bytes(settings, spec),
        "checkpoints": (sizes.slabs - sizes.slots) * slab_bytes(settings, spec),
        "slots": sizes.slots * slot_bytes(spec, sizes.blocks_per_slot),
        "activations": workspace_bytes(settings, spec, sizes.slots),
    }
    told = info.weight_bytes + info.pool_bytes + info.scratch_bytes
    engine.close()
    return {"parts": parts, "told": told, "opened": opened, "peak": peak, "idle": idle}


def one(options: argparse.Namespace) -> None:
    settings = Settings(
        context=options.context, max_seqs=options.sequences, kv=options.kv,
        threads=options.threads, prefix_cache_slabs=options.slabs,
    )  # fmt: skip
    print(json.dumps(asyncio.run(measure(options.one, settings))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="ksl-nano,synth:0.8b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--slabs", type=int, default=8, help="of checkpoints")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help="measure this model here and print JSON")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.one:
        one(options)
        return
    report = Report("memory")
    for model in options.models.split(","):
        command = [sys.executable, "-m", "bench.memory", "--one", model]
        for name in ("context", "sequences", "slabs", "kv", "threads"):
            command += [f"--{name}", str(getattr(options, name))]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        total = sum(found["parts"].values())
        mib = {f"{name}_mib": size / 2**20 for name, size in found["parts"].items()}
        report.add(
            model.removeprefix("synth:"), **mib, plan_mib=total / 2**20,
            opened_mib=found["opened"] / 2**20, peak_mib=found["peak"] / 2**20,
            idle_mib=found["idle"] / 2**20, ratio=found["peak"] / total, target=1 + TARGET,
            of="the plan",
        )  # fmt: skip
    report.write(options.save)


if __name__ == "__main__":
    main()
