"""Time of attention by KV format and context: what a key costs a query, and what reading it needs.

    python -m bench.attention [--model synth:0.8b] [--kv bf16,q4] [--contexts 4096,32768]
                              [--threads 2] [--save]

An engine of the model's attention layers and nothing else to speak of (hidden size 64) runs one
decode column, and a chunk of prompt columns, at each context; the same at context 0 is taken off.
The pool holds encoded normal values. `key_ns` is the time of one key in every attention layer of
the model, for one column; `gb_s` what a decode column reads of the pool; `share` that against the
rate at which all threads together read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from bench.cpu import BLOCK, Runner, setup
from bench.kernels import Program
from bench.report import Report
from kslserve.engine.budget import kv_token_bytes
from kslserve.engine.kvrows import KV_KEY, KV_VALUE, kv_encode
from kslserve.engine.model import FILL_CONSTANT, FILL_UNIFORM, Fill, ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import OpKind, Row, RowKind, StateOp, Wave
from kslserve.ksl import layout
from kslserve.ksl.open import open_source

HIDDEN = 64
SLACK = 1024  # positions behind the context


def attention_only(spec: ModelSpec) -> tuple[ModelSpec, list[TensorArg]]:
    """The attention layers of a model between matrices too small to matter."""
    kinds = tuple(kind for kind in spec.layer_kinds if kind == "full")
    small = replace(
        spec, vocab=64, token_limit=64, hidden=HIDDEN, intermediate=HIDDEN, layer_kinds=kinds,
        mtp_layers=0,
    )  # fmt: skip
    tensors = []
    for name, (rows, cols) in layout.expected(small).items():
        fill = Fill(FILL_CONSTANT, 0, 0.0) if cols == 1 else Fill(FILL_UNIFORM, 1, 0.2)
        tensors.append(TensorArg(name, layout.ENC_BF16, rows, cols, fill=fill))
    return small, tensors


def block_image(spec: ModelSpec, kv: str, rng: np.random.Generator) -> bytes:
    """A block of BLOCK positions of normal values, as the pool holds it."""
    planes = []
    for _ in spec.layer_kinds:
        for side in (KV_KEY, KV_VALUE):
            x = rng.standard_normal((BLOCK * spec.kv_heads, spec.head_dim)).astype(np.float32)
            planes += [plane.tobytes() for plane in kv_encode(kv, side, x)]
    return b"".join(planes)


async def measure(args: argparse.Namespace, report: Report) -> None:
    source = open_source(args.model)
    spec, tensors = attention_only(source.spec)
    source.close()
    contexts = [int(c) for c in args.contexts.split(",")]
    blocks = -(-(max(contexts) + SLACK) // BLOCK)
    pools = PoolSizes(1, 1, blocks, BLOCK, blocks, args.columns)
    rng = np.random.default_rng(1)
    report.add("model", shape=args.model, heads=spec.heads, kv_heads=spec.kv_heads,
               head_dim=spec.head_dim, layers=len(spec.layer_kinds))  # fmt: skip
    with Program(args.cpu, args.threads) as program:
        reads = program.read_rate()
    for kv in args.kv.split(","):
        engine = NativeEngine.open(
            spec, tensors, pools, kv_format=kv, isa=args.cpu, threads=args.threads
        )
        runner = Runner(engine)
        wave = Wave(0)
        setup(wave, 1, blocks)
        images = [np.frombuffer(block_image(spec, kv, rng), np.uint8).copy() for _ in range(4)]
        wave.before += [
            StateOp(OpKind.LOAD_BLOCK, block, data=images[block % 4]) for block in range(blocks)
        ]
        await runner.run(wave)
        tokens = rng.integers(0, spec.vocab, args.columns).astype(np.int32)
        token_bytes = engine.info.kv_code_bytes or kv_token_bytes(spec, kv)

        async def seconds(start: int, n: int, runner: Runner = runner, ids: Any = tokens) -> float:
            times = []
            for _ in range(args.repeats if n == 1 else 1 + args.repeats // 10):
                wave = Wave(0, rows=[Row(RowKind.PREFILL, 0, 0, start, n, ids[:n])])
                began = time.perf_counter()
                await runner.run(wave)
                times.append(time.perf_counter() - began)
            return statistics.median(times)

        for context in contexts:
            for n in (1, args.columns):
                base = await seconds(0, n)
                taken = await seconds(context, n) - base
                row = {"key_ns": taken / n / context * 1e9}
                if n == 1:
                    rate = context * token_bytes / taken
                    row |= {"ms": taken * 1e3, "gb_s": rate / 1e9, "share": rate / reads}
                report.add(f"{kv}_{context}_{'decode' if n == 1 else 'prefill'}", **row)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:0.8b")
    parser.add_argument("--kv", default="f32,bf16,fp8,q4,int8_g64,int4_g32")
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--cpu", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("attention")
    asyncio.run(measure(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
