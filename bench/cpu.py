"""Decode and prefill rates of the CPU backend, with the limits of this machine measured in the same
run.

    python -m bench.cpu [--model ksl-nano] [--streams 1,4] [--prompt 512] [--threads 0] [--save]

Decode limit: weight bytes read per token against the read rate of a BLAS dot product over a buffer
of that size. Prefill limit: 2 operations per weight and token against a BLAS float32 matrix
product.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np

from bench.report import Report
from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Done, OpKind, Row, RowKind, SlotConfig, StateOp, TableEdit, Wave
from kslserve.ksl.open import open_model

BLOCK = 128


def is_projection(tensor: TensorArg) -> bool:
    """Whether every token of a prompt is multiplied by it; the head serves the last one only."""
    small = tensor.cols == 1 or tensor.name.endswith("conv1d.weight")
    return not small and tensor.name.startswith("model.layers.")


class Runner:
    """Runs waves one at a time and waits for each on the event loop, as the scheduler does."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.waves = 0
        self._done: asyncio.Future[Done] | None = None
        engine.start(self._on_done)

    def _on_done(self, done: Done) -> None:
        assert self._done is not None
        self._done.set_result(done)

    async def run(self, wave: Wave) -> Done:
        self.waves += 1
        wave.id = self.waves
        self._done = asyncio.get_running_loop().create_future()
        assert self.engine.submit(wave)
        done = await self._done
        assert done.error is None, done.error
        return done


def best(seconds: list[float]) -> float:
    """The median: shared machines have slow outliers, and a minimum flatters."""
    return sorted(seconds)[len(seconds) // 2]


def read_limit(size: int) -> float:
    """Bytes per second of a dot product over `size` bytes, repeated."""
    data = np.ones(max(size // 4, 1024), np.float32)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        np.dot(data, data)
        times.append(time.perf_counter() - start)
    return data.nbytes / best(times)


def product_limit() -> float:
    """Float32 operations per second of a 1024-cubed matrix product."""
    a = np.ones((1024, 1024), np.float32)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / best(times)


def setup(wave: Wave, streams: int, blocks_per_slot: int) -> None:
    for s in range(streams):
        config = SlotConfig(SamplingParams(temperature=0.0), seed=s + 1)
        wave.before.append(StateOp(OpKind.ZERO_SLAB, s))
        wave.before.append(StateOp(OpKind.CONFIGURE, s, data=config))
        blocks = range(s * blocks_per_slot, (s + 1) * blocks_per_slot)
        wave.edits.append(TableEdit(s, 0, list(blocks)))


async def measure(args: argparse.Namespace, report: Report) -> None:
    streams_list = [int(s) for s in args.streams.split(",")]
    with open_model(args.model, weights=args.weights) as model:
        rng = np.random.default_rng(1)
        prompt = rng.integers(0, model.spec.token_limit, args.prompt, dtype=np.int32)
        per_slot = -(-(args.prompt + args.tokens + 1) // BLOCK)
        most = max(streams_list)
        pools = PoolSizes(most, most, most * per_slot, BLOCK, per_slot, args.columns)
        weights = sum(t.rows * t.cols for t in model.tensors if is_projection(t))
        engine = NativeEngine.open(
            model.spec, model.tensors, pools, kv_format=args.kv, isa=args.cpu, threads=args.threads
        )
        info = engine.info
    runner = Runner(engine)
    reads, flops = read_limit(info.token_bytes), product_limit()
    report.add(
        "limits", isa=info.isa, threads=info.threads, read_gb_s=reads / 1e9, gflop_s=flops / 1e9,
        bytes_per_token=info.token_bytes, matrix_weights=weights,
    )  # fmt: skip
    for streams in streams_list:
        prefill = []
        wave = Wave(0)
        setup(wave, streams, per_slot)
        for s in range(streams):
            for start in range(0, args.prompt, args.columns):
                n = min(args.columns, args.prompt - start)
                last = start + n == args.prompt
                kind = RowKind.LAST if last else RowKind.PREFILL
                wave.rows = [Row(kind, s, s, start, n, prompt[start : start + n])]
                began = time.perf_counter()
                await runner.run(wave)
                prefill.append((n, time.perf_counter() - began))
                wave = Wave(0)
        times = []
        rows = [Row(RowKind.LAST, s, s, args.prompt, 1, [-1]) for s in range(streams)]
        for _ in range(args.tokens):
            began = time.perf_counter()
            await runner.run(Wave(0, rows=rows))
            times.append(time.perf_counter() - began)
            for row in rows:
                row.start += 1
        step = best(times)
        full = [seconds / n for n, seconds in prefill if n == prefill[0][0]]
        rate = 1 / best(full)
        report.add(
            f"prefill_{args.prompt}", streams=streams, tok_s=rate,
            ratio=rate * 2 * weights / flops, of="float32 product",
        )  # fmt: skip
        report.add(
            "decode", streams=streams, tok_s=streams / step, wave_ms=step * 1e3,
            ratio=info.token_bytes / step / reads, of="read rate of the weight bytes",
        )  # fmt: skip
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--cpu", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("cpu")
    asyncio.run(measure(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
