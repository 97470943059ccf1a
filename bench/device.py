"""Decode speed of the CUDA backend on a model without data.

    python -m bench.device [--model synth:27b] [--weights nvfp4,fp6] [--kv q4]
                           [--streams 1,2,4,8,16,32] [--contexts 2048,32768] [--waves 24] [--save]

First the read bandwidth of the device is measured, then every cell: `streams` sequences that each
have `context` computed positions decode one token a wave. KV rows hold whatever the pool holds,
which costs the same to read. ratio: the rate at which weights are read over that bandwidth. A cell
that does not fit in memory is left out with a line. Prompts: bench.prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from bench.report import Report
from kslserve.engine.cuda import load_library
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Row, RowKind
from kslserve.errors import KslError
from kslserve.ksl.open import open_model
from kslserve.selftest.waves import Waves

BLOCK = 128


async def cell(runner: Waves, streams: int, context: int, waves: int) -> dict[str, float]:
    await runner.begin(range(streams))
    device, gaps = [], []
    last_end = 0
    for step in range(waves):
        rows = [
            Row(RowKind.LAST, slot, slot, context + step, 1, [11 + slot if step == 0 else -1])
            for slot in range(streams)
        ]
        done = await runner.run(rows=rows)
        if step >= 4:
            device.append((done.ended_ns - done.started_ns) / 1e6)
            gaps.append((done.started_ns - last_end) / 1e6)
        last_end = done.ended_ns
    wave, gap = statistics.median(device), statistics.median(gaps)
    return {"wave_ms": wave, "gap_ms": gap, "tok_s": streams / (wave + gap) * 1e3}


async def bench(options: argparse.Namespace, report: Report) -> None:
    library = load_library()
    bandwidth = library.read_bandwidth(8 << 30)
    report.add("read_bandwidth", gb_s=bandwidth / 1e9)
    for weights in options.weights.split(","):
        for context in map(int, options.contexts.split(",")):
            streams = sorted(map(int, options.streams.split(",")))
            while streams:
                most = streams[-1]
                per_slot = -(-(context + options.waves + 8) // BLOCK)
                sizes = PoolSizes(
                    slots=most,
                    slabs=most,
                    blocks=per_slot * most,
                    block_tokens=BLOCK,
                    blocks_per_slot=per_slot,
                    wave_columns=max(options.columns, most),
                )
                begun = time.monotonic()
                try:
                    with open_model(options.model, weights=weights) as model:
                        engine = NativeEngine.open(
                            model.spec, model.tensors, sizes, kv_format=options.kv, library=library
                        )
                except KslError as error:
                    print(f"{weights} {most} x {context}: {error}", flush=True)
                    streams.pop()
                    continue
                info = engine.info
                print(
                    f"{weights} opened in {time.monotonic() - begun:.1f} s: weights "
                    f"{info.weight_bytes / 2**30:.2f} GiB, {info.token_bytes / 1e9:.2f} GB a token,"
                    f" pools {info.pool_bytes / 2**30:.2f} GiB, workspace "
                    f"{info.scratch_bytes / 2**30:.2f} GiB; {info.numerics}",
                    flush=True,
                )
                runner = Waves(engine)
                for n in streams:
                    found = await cell(runner, n, context, options.waves)
                    share = info.token_bytes / (found["wave_ms"] / 1e3) / bandwidth
                    report.add(
                        f"{weights}_{n}x{context}", **found, ratio=share, of="read bandwidth"
                    )
                engine.close()
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:27b")
    parser.add_argument("--weights", default="nvfp4,fp6")
    parser.add_argument("--kv", default="q4")
    parser.add_argument("--streams", default="1,2,4,8,16,32")
    parser.add_argument("--contexts", default="2048,8192,32768,131072")
    parser.add_argument("--waves", type=int, default=24)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    report = Report("device")
    asyncio.run(bench(options, report))
    report.write(options.save)


if __name__ == "__main__":
    main()
