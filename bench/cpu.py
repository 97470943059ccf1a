"""Decode and prefill rates of the CPU backend, with the limits of this machine measured in the same
run, and llama.cpp beside it where it is present.

    python -m bench.cpu [--model ksl-nano] [--weights auto] [--kv bf16] [--threads 0]
                        [--streams 1,2,4,8] [--prompts 512,4096] [--contexts 512,4096,32768]
                        [--peer FILE.gguf] [--save [NAME]]

`--model synth:0.8b` is a random model of that shape. Decode: `ratio` is the weight bytes of a token
over the time of a wave, as a share of the rate at which all threads read that many bytes, measured
right before and after (the higher one counts). It is for one stream the share of what memory
allows; for more streams the gain over one is `times`. KV rows of a decode cell are zeros,
which cost the same to read as others. `deep`: the speed of one stream behind the longest context as
a share of that behind the shortest, the median of pairs taken in turn, since the rate of memory may
change from one minute to the next. Prefill: `ratio` is 2 operations per layer weight and
token over the peak of the arithmetic unit in use. All rates are from medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np

from bench.kernels import Program
from bench.peer import Peer, find_peer
from bench.report import Report
from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import (
    Done,
    EngineInfo,
    OpKind,
    Row,
    RowKind,
    SlotConfig,
    StateOp,
    TableEdit,
    Wave,
)
from kslserve.ksl.open import open_model

BLOCK = 128
DECODE_SECONDS = 1.5  # of one cell
PREFILL_SECONDS = 2.0
PAIRS, BURST = 25, 4  # of a comparison of two contexts; waves of either in a pair
PEER_TOKENS = 64  # that the peer makes in one cell


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

    async def seconds(self, wave: Wave) -> float:
        """Of a wave, from submission to the callback."""
        began = time.perf_counter()
        await self.run(wave)
        return time.perf_counter() - began


def setup(wave: Wave, streams: int, blocks_per_slot: int) -> None:
    """Adds fresh sequences in slots and slabs [0, streams), each with blocks of its own."""
    for s in range(streams):
        config = SlotConfig(SamplingParams(temperature=0.0), seed=s + 1)
        wave.before.append(StateOp(OpKind.ZERO_SLAB, s))
        wave.before.append(StateOp(OpKind.CONFIGURE, s, data=config))
        blocks = range(s * blocks_per_slot, (s + 1) * blocks_per_slot)
        wave.edits.append(TableEdit(s, 0, list(blocks)))


async def prefill(runner: Runner, prompt: np.ndarray, columns: int) -> float:
    """Tokens per second of a cold prompt, all its waves."""
    rates = []
    end = time.perf_counter() + PREFILL_SECONDS
    while not rates or (time.perf_counter() < end and len(rates) < 9):
        seconds = 0.0
        for start in range(0, len(prompt), columns):
            part = prompt[start : start + columns]
            last = start + len(part) == len(prompt)
            kind = RowKind.LAST if last else RowKind.PREFILL
            row = Row(kind, 0, 0, start, len(part), part)
            seconds += await runner.seconds(Wave(0, rows=[row]))
        rates.append(len(prompt) / seconds)
    return statistics.median(rates)


async def decode(runner: Runner, streams: int, context: int, room: int) -> float:
    """Seconds of a wave of `streams` sequences that each have `context` positions."""
    times: list[float] = []
    rows = [Row(RowKind.LAST, s, s, context, 1, [11 + s]) for s in range(streams)]
    end = time.perf_counter() + DECODE_SECONDS
    while len(times) < 5 or (time.perf_counter() < end and len(times) < room):
        times.append(await runner.seconds(Wave(0, rows=rows)))
        for row in rows:
            row.start, row.tokens = row.start + 1, [-1]
    return statistics.median(times)


async def deep(runner: Runner, short: int, long: int) -> tuple[float, float, float]:
    """Speed of one stream at context `long` relative to `short`: median of pairs, the least and the
    largest of all but the outer tenths."""
    row = Row(RowKind.LAST, 0, 0, 0, 1, [11])
    wave = Wave(0, rows=[row])
    ratios = []
    for _ in range(PAIRS):
        medians = []
        for context in (short, long):
            times = []
            for i in range(BURST):
                row.start = context + i
                times.append(await runner.seconds(wave))
            medians.append(statistics.median(times))
        ratios.append(medians[0] / medians[1])
    ratios.sort()
    return statistics.median(ratios), ratios[PAIRS // 10], ratios[-1 - PAIRS // 10]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


async def measure(args: argparse.Namespace, report: Report, program: Program) -> None:
    streams, contexts, prompts = map(numbers, (args.streams, args.contexts, args.prompts))
    room = 400  # tokens that a decode cell may add
    longest = max([*[c + room for c in contexts], *prompts])
    most, per_slot = max(streams), -(-longest // BLOCK)
    with open_model(args.model, weights=args.weights, head=args.head) as model:
        weights = sum(t.rows * t.cols for t in model.tensors if is_projection(t))
        pools = PoolSizes(most, most, most * per_slot, BLOCK, per_slot, args.columns)
        limit = model.spec.token_limit
        engine = NativeEngine.open(
            model.spec, model.tensors, pools, kv_format=args.kv, isa=args.cpu,
            threads=args.threads, activations=args.activations, nice=args.nice,
        )  # fmt: skip
    info: EngineInfo = engine.info
    peak = program.peak(info.activation.partition("+")[0])
    report.add(
        "model", model=args.model, isa=info.isa, threads=info.threads, numerics=info.numerics,
        bytes_per_token=info.token_bytes, matrix_weights=weights, peak_gop_s=peak / 1e9,
    )  # fmt: skip
    peer = find_peer(args.peer, info.threads, longest + PEER_TOKENS, most)
    runner = Runner(engine)
    wave = Wave(0)
    setup(wave, most, per_slot)
    # Blocks that nobody wrote share one page of zeros, which would be read from the cache.
    blank = np.zeros(info.block_bytes, np.uint8)
    wave.before += [StateOp(OpKind.LOAD_BLOCK, b, data=blank) for b in range(pools.blocks)]
    await runner.run(wave)
    rng = np.random.default_rng(1)
    await prefill(runner, rng.integers(0, limit, 64, dtype=np.int32), args.columns)
    for n in prompts:
        rate = await prefill(runner, rng.integers(0, limit, n, dtype=np.int32), args.columns)
        beside = compare(rate, peer, peer.prefill(n) if peer else None)
        ratio = rate * 2 * weights / peak if peak else 0.0
        report.add(f"prefill_{n}", tok_s=rate, **beside, ratio=ratio, of="peak")
    single: dict[int, float] = {}
    for context in contexts:
        for n in streams:
            before = program.read_rate(info.token_bytes)
            step = await decode(runner, n, context, room)
            reads = max(before, program.read_rate(info.token_bytes))
            if n == 1:
                single[context] = 1 / step
            theirs = None
            if peer and context <= args.peer_context:
                theirs = peer.decode(context, PEER_TOKENS, n)
            report.add(
                f"decode_{n}_at_{context}", tok_s=n / step, wave_ms=step * 1e3,
                **({"times": n / step / single[context]} if context in single else {}),
                **compare(n / step, peer, theirs), ratio=info.token_bytes / step / reads,
                of=f"read rate, {reads / 1e9:.1f} GB/s",
            )  # fmt: skip
    if len(contexts) > 1:
        short, long = min(contexts), max(contexts)
        ratio, low, high = await deep(runner, short, long)
        of = f"speed at {short}"
        report.add(f"deep_1_at_{long}", ratio=ratio, low=low, high=high, of=of)
    engine.close()


def compare(rate: float, peer: Peer | None, theirs: float | None) -> dict[str, float]:
    """The peer's figure and how many times it ours is."""
    if peer is None or theirs is None:
        return {}
    return {peer.name.replace("-", "_"): theirs, "ahead": rate / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--head", default="auto")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--cpu", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--contexts", default="512,4096,32768")
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument(
        "--peer",
        default="",
        help="GGUF file of the same shape for llama.cpp, see bench/gguf_peer.py",
    )
    parser.add_argument("--peer-context", type=int, default=4096, help="deepest cell of the peer")
    parser.add_argument("--save", nargs="?", const="cpu", default=None)
    args = parser.parse_args()
    report = Report(args.save or "cpu")
    with Program(args.cpu, args.threads) as program:
        asyncio.run(measure(args, report, program))
    report.write(args.save is not None)


if __name__ == "__main__":
    main()
