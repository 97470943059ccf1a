"""Decode speed of the CUDA backend on a model without data. `pytest tests/device` proves it first.

    python -m bench.decode [--model synth:27b] [--weights nvfp4,fp6] [--kv q4]
                           [--streams 1,2,4,8,16,32] [--contexts 2048,32768] [--waves 24]
                           [--kernels 1] [--save]

First the read bandwidth of the device is measured, then every cell: `streams` sequences that each
have `context` computed positions decode one token a wave. KV rows hold whatever the pool holds,
which costs the same to read. ratio: the rate at which weights are read over that bandwidth. gap: of
the host between two waves, and its part of a wave; `ahead`: the same with the next wave submitted
before the one in front ends, as --submit-ahead does. A cell that does not fit in memory is left out
with a line. peer: llama.cpp on the same card, see PEER.

--kernels names numbers of streams (1) whose kernels are listed, at the first context, where `ncu`
may run: calls a wave, time, rate of device memory. Prompts: bench.prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
WARM_UP = 4
# llama.cpp b11434, CUDA, sm_90, flash attention on, a random 27B of this shape in its own NVFP4
# (14.70 GiB, output in Q8_0) on an H200: tok/s of all streams by context, by streams at 2k.
PEER = {(1, 2048): 88.1, (1, 32768): 85.5, (4, 2048): 239, (8, 2048): 301, (16, 2048): 452,
        (32, 2048): 614}  # fmt: skip


def opened(
    model: str,
    weights: str,
    kv: str,
    streams: int,
    positions: int,
    columns: int,
    ring: int = 1,
    portable: bool = False,
) -> NativeEngine:
    """An engine whose slots have room for so many positions. portable: see NativeEngine.open."""
    per_slot = -(-positions // BLOCK)
    sizes = PoolSizes(
        slots=streams,
        slabs=streams,
        blocks=per_slot * streams,
        block_tokens=BLOCK,
        blocks_per_slot=per_slot,
        wave_columns=max(columns, streams),
        ring_depth=ring,
    )
    with open_model(model, weights=weights) as file:
        return NativeEngine.open(
            file.spec,
            file.tensors,
            sizes,
            kv_format=kv,
            library=load_library(),
            portable=portable,
        )


async def cell(runner: Waves, streams: int, context: int, waves: int) -> dict[str, float]:
    await runner.begin(range(streams))
    device, gaps = [], []
    last_end = 0
    for step in range(waves):
        done = await runner.run(rows=rows_of(streams, context, step))
        if step >= WARM_UP:
            device.append((done.ended_ns - done.started_ns) / 1e6)
            gaps.append((done.started_ns - last_end) / 1e6)
        last_end = done.ended_ns
    wave, gap = statistics.median(device), statistics.median(gaps)
    return {
        "wave_ms": wave, "gap_ms": gap, "gap_part": gap / wave,
        "tok_s": streams / (wave + gap) * 1e3,
    }  # fmt: skip


def rows_of(streams: int, context: int, step: int) -> list[Row]:
    return [
        Row(RowKind.LAST, slot, slot, context + step, 1, [11 + slot if step == 0 else -1])
        for slot in range(streams)
    ]


async def ahead(runner: Waves, streams: int, context: int, waves: int) -> float:
    """Seconds a wave takes with one more in the engine's ring."""
    await runner.begin(range(streams))
    ends, last = [], None
    for step in range(waves):
        sent = runner.send(rows=rows_of(streams, context, step))
        if last is not None:
            ends.append((await last).ended_ns)
        last = sent
    assert last is not None
    ends.append((await last).ended_ns)
    steps = [b - a for a, b in itertools.pairwise(ends[WARM_UP:])]
    return statistics.median(steps) / 1e9


async def bench(options: argparse.Namespace, report: Report) -> None:
    bandwidth = load_library().read_bandwidth(8 << 30)
    report.add("read_bandwidth", gb_s=bandwidth / 1e9)
    contexts = [int(text) for text in options.contexts.split(",")]
    for weights in options.weights.split(","):
        for context in contexts:
            streams = sorted(map(int, options.streams.split(",")))
            while streams:
                positions = context + options.waves + 8
                begun = time.monotonic()
                try:
                    engine = opened(
                        options.model, weights, options.kv, streams[-1], positions,
                        options.columns, ring=2,
                    )  # fmt: skip
                except KslError as error:
                    print(f"{weights} {streams[-1]} x {context}: {error}", flush=True)
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
                with Waves(engine) as runner:
                    for n in streams:
                        found = await cell(runner, n, context, options.waves)
                        found["ahead_tok_s"] = n / await ahead(runner, n, context, options.waves)
                        share = info.token_bytes / (found["wave_ms"] / 1e3) / bandwidth
                        peer = PEER.get((n, context))
                        more = (
                            {"peer_tok_s": peer, "over_peer": found["tok_s"] / peer}
                            if (peer and options.model == "synth:27b")
                            else {}
                        )
                        report.add(
                            f"{weights}_{n}x{context}", **found, ratio=share, of="read bandwidth",
                            **more,
                        )  # fmt: skip
                break
        for n in map(int, options.kernels.split(",") if options.kernels else ()):
            profile(options, report, weights, n, contexts[0], bandwidth)


def profile(
    options: argparse.Namespace, report: Report, weights: str, streams: int, context: int,
    bandwidth: float,
) -> None:  # fmt: skip
    """The table of kernels of a decode wave."""
    from bench.ncu import kernels  # it opens engines by this module

    found = kernels(options.model, weights, options.kv, streams, context)
    if not found:
        return
    cell_name = f"{weights}_{streams}x{context}"
    for kernel in found:
        rate = kernel.bytes / kernel.seconds
        report.add(
            f"{cell_name}_{kernel.name}", calls=kernel.calls, us=kernel.seconds * 1e6,
            gb_s=rate / 1e9, ratio=rate / bandwidth, of="read bandwidth",
        )  # fmt: skip
    report.add(
        f"{cell_name}_kernels", calls=sum(k.calls for k in found),
        us=sum(k.seconds for k in found) * 1e6, target=600,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:27b")
    parser.add_argument("--weights", default="nvfp4,fp6")
    parser.add_argument("--kv", default="q4")
    parser.add_argument("--streams", default="1,2,4,8,16,32")
    parser.add_argument("--contexts", default="2048,8192,32768,131072")
    parser.add_argument("--waves", type=int, default=24)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--kernels", default="1", help="numbers of streams; empty: none")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    report = Report("decode")
    asyncio.run(bench(options, report))
    report.write(options.save)


if __name__ == "__main__":
    main()
