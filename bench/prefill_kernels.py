"""Kernels of one prompt wave on the CUDA backend: what each takes, and how near products come to
the largest that torch makes. Needs torch, whose profiler sees every kernel of the process.

    python -m bench.prefill_kernels [--model synth:27b] [--weights nvfp4,fp6] [--kv q4]
                                    [--columns 2048] [--positions 8192,102400] [--save]

`W_at_P_KERNEL`: time of all its launches in a wave of `columns` tokens behind P others, less what
overlaps the kernel before it, and its share. `W_at_P_PLACE`: the matrix product of one place in a
layer. ratio: of its rate to a large bf16 product of torch in the same run. KV rows hold whatever
the pool holds, which costs the same to read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from bench.decode import opened
from bench.prefill import Prompts, matmul_peak
from bench.report import Report
from kslserve.engine.model import ModelSpec
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Row, RowKind
from kslserve.ksl.open import open_model

PRODUCTS = ("wide", "wide8")  # their kernels begin with one of these
SHOWN = 16


def short(name: str) -> str:
    """A kernel's name without its namespaces and parameters."""
    name = name.replace("(anonymous namespace)", "").replace("void ", "").split("(")[0]
    return name.replace("ksl::", "").replace("::", "").replace(" ", "")


def places(spec: ModelSpec) -> list[tuple[str, float]]:
    """The products of a wave's layers in order: the place and its operations a token."""
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    value = spec.lin_value_heads * spec.lin_value_dim
    mixed = 2 * spec.lin_key_heads * spec.lin_key_dim + 2 * value
    full = [("attn_in", spec.hidden * (2 * query + 2 * kv)), ("attn_out", query * spec.hidden)]
    linear = [("gdn_in", spec.hidden * mixed), ("gdn_out", value * spec.hidden)]
    size = spec.hidden * spec.intermediate
    mlp = [("gate_up", 2 * size), ("down", size)]
    layers = [(full if kind == "full" else linear) + mlp for kind in spec.layer_kinds]
    return [(place, 2.0 * macs) for layer in layers for place, macs in layer]


async def kernels(prompts: Prompts, at: int) -> list[tuple[str, float]]:
    """Names and microseconds of a wave's kernels in order."""
    row = Row(RowKind.PREFILL, 0, 0, at, prompts.columns, list(range(1, prompts.columns + 1)))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        await prompts.wave([row])
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    times, last = [], 0.0
    for start, end, name in events:
        times.append((short(name), max(0.0, end - max(start, last))))
        last = max(last, end)
    return times


async def bench(
    report: Report, weights: str, spec: ModelSpec, engine: NativeEngine, args: argparse.Namespace
) -> None:
    prompts = Prompts(engine, args.columns)
    peak = matmul_peak()
    await prompts.runner.begin([0])
    await prompts.prompt(0, args.columns)
    for at in args.positions:
        row = Row(RowKind.PREFILL, 0, 0, at, args.columns, list(range(1, args.columns + 1)))
        wave = statistics.median([await prompts.wave([row]) for _ in range(3)])
        case = f"{weights}_at_{at}"
        report.add(case, ms=wave * 1e3, tok_s=args.columns / wave, peak_tflops=peak / 1e12)
        times = await kernels(prompts, at)
        total = sum(us for _, us in times)
        by_name: defaultdict[str, list[float]] = defaultdict(list)
        for name, us in times:
            by_name[name].append(us)
        for name, all_us in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
            us = sum(all_us)
            report.add(f"{case}_{name}", ms=us / 1e3, share=us / total, launches=len(all_us))
        products = [us for name, us in times if name.split("<")[0] in PRODUCTS]
        by_place: defaultdict[str, list[float]] = defaultdict(list)
        flops = dict(places(spec))
        for (place, _), us in zip(places(spec), products, strict=False):
            by_place[place].append(us)
        for place, all_us in by_place.items():
            us = statistics.fmean(all_us)
            rate = flops[place] * args.columns / (us / 1e6)
            report.add(f"{case}_{place}", us=us, tflops=rate / 1e12, ratio=rate / peak)
        attention = sum(us for name, us in times if name.startswith("flash"))
        if attention:
            heads = 4.0 * spec.heads * spec.head_dim * list(spec.layer_kinds).count("full")
            rate = heads * (at + args.columns / 2) * args.columns / (attention / 1e6)
            report.add(f"{case}_attention", tflops=rate / 1e12, ratio=rate / peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:27b")
    parser.add_argument("--weights", default="nvfp4,fp6")
    parser.add_argument("--kv", default="q4")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--positions", default="8192,102400")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.positions = [int(n) for n in args.positions.split(",")]
    positions = max(args.positions) + args.columns
    report = Report("prefill_kernels")
    for weights in args.weights.split(","):
        with open_model(args.model, weights=weights) as model:
            spec = model.spec
        engine = opened(args.model, weights, args.kv, 1, positions, args.columns)
        asyncio.run(bench(report, weights, spec, engine, args))
        engine.close()
    report.write(args.save)


if __name__ == "__main__":
    main()
