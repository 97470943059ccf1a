"""Prompts on the CUDA backend, on a model without data.

    python -m bench.prefill [--model synth:27b] [--weights nvfp4,fp6] [--kv q4] [--columns 2048]
                            [--lengths 512,2048,8192,32768,131072] [--peer 2048,8192]
                            [--portable] [--save]

`cold_N`: a prompt of N tokens in waves of `columns`, to its first token. `warm_N`: a turn of 200
new tokens behind N. `decode_beside_N`: a wave of one decoding row and `columns` - 1 prompt columns
at N, which is the gap that the row sees. tflops: of the matrix products alone, over all of the
time; where torch is installed, the ratio is to its largest bf16 product in the same run. `--peer`:
prompts of these lengths by transformers first, see bench/torch_peer.py; over_peer compares with it.
`--portable`: with the attention that an sm_120 runs; a report of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from bench.decode import opened
from bench.report import Report
from bench.torch_peer import measure
from kslserve.engine.model import ModelSpec
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Row, RowKind
from kslserve.ksl.open import open_model
from kslserve.selftest.waves import Waves

WARM = 200


def product_flops(spec: ModelSpec) -> float:
    """Operations of a prompt token in the matrix products of all layers."""
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    full = spec.hidden * (2 * query + 2 * kv) + query * spec.hidden
    value = spec.lin_value_heads * spec.lin_value_dim
    inputs = 2 * spec.lin_key_heads * spec.lin_key_dim + 2 * value + 2 * spec.lin_value_heads
    linear = spec.hidden * inputs + value * spec.hidden
    mlp = 3 * spec.hidden * spec.intermediate
    return 2.0 * sum((full if kind == "full" else linear) + mlp for kind in spec.layer_kinds)


def matmul_peak() -> float:
    """FLOP/s of a large bf16 product in torch; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0.0
    n, seconds = 8192, []
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    torch.cuda.empty_cache()
    return 2.0 * n**3 / statistics.median(seconds)


class Prompts:
    """Waves of two slots with one long table each."""

    def __init__(self, engine: NativeEngine, columns: int) -> None:
        self.runner = Waves(engine)
        self.columns = columns

    async def wave(self, rows: list[Row]) -> float:
        done = await self.runner.run(rows=rows)
        return (done.ended_ns - done.started_ns) / 1e9

    async def prompt(self, start: int, n: int) -> float:
        """Seconds of the device for n tokens from start on, up to the sampled one."""
        seconds = 0.0
        for at in range(start, start + n, self.columns):
            part = min(self.columns, start + n - at)
            kind = RowKind.LAST if at + part == start + n else RowKind.PREFILL
            seconds += await self.wave([Row(kind, 0, 0, at, part, list(range(1, part + 1)))])
        return seconds

    async def beside(self, start: int) -> float:
        rest = self.columns - 1
        return await self.wave(
            [
                Row(RowKind.LAST, 1, 1, 64, 1, [5]),
                Row(RowKind.PREFILL, 0, 0, start, rest, list(range(1, rest + 1))),
            ]
        )


async def bench(
    report: Report, weights: str, token_flops: float, engine: NativeEngine, args: argparse.Namespace
) -> None:
    prompts = Prompts(engine, args.columns)
    lengths = args.lengths
    peak = matmul_peak()
    await prompts.runner.begin([0])
    await prompts.runner.begin([1])
    await prompts.prompt(0, args.columns)
    cold = {}
    for n in lengths:
        await prompts.runner.begin([0])
        cold[n] = await prompts.prompt(0, n)
        flops = token_flops * n / cold[n]
        figures = {"tok_s": n / cold[n], "ms": cold[n] * 1e3, "tflops": flops / 1e12}
        if peak:
            figures["ratio"] = flops / peak
        if n in args.theirs:
            figures["over_peer"] = args.theirs[n] / cold[n]
        report.add(f"{weights}_cold_{n}", **figures)
    for n in lengths:
        warm = statistics.median([await prompts.prompt(n, WARM) for _ in range(5)])
        report.add(f"{weights}_warm_{n}", ms=warm * 1e3, times_faster_than_cold=cold[n] / warm)
        gap = statistics.median([await prompts.beside(n) for _ in range(3)])
        report.add(f"{weights}_decode_beside_{n}", ms=gap * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:27b")
    parser.add_argument("--weights", default="nvfp4,fp6")
    parser.add_argument("--kv", default="q4")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--lengths", default="512,2048,8192,32768,131072")
    parser.add_argument("--peer", default="")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.lengths = [int(n) for n in args.lengths.split(",")]
    positions = max(args.lengths) + args.columns
    report = Report("prefill_portable" if args.portable else "prefill")
    args.theirs = {}
    if args.peer and (found := measure(args.model, args.peer)):
        args.theirs = {int(n): seconds for n, seconds in found.pop("seconds").items()}
        speeds = {f"tok_s_{n}": n / seconds for n, seconds in args.theirs.items()}
        report.add("peer", **found, **speeds)
    for weights in args.weights.split(","):
        with open_model(args.model, weights=weights) as model:
            flops = product_flops(model.spec)
        engine = opened(
            args.model, weights, args.kv, 2, positions, args.columns, portable=args.portable
        )
        asyncio.run(bench(report, weights, flops, engine, args))
        engine.close()
    report.write(args.save)


if __name__ == "__main__":
    main()
