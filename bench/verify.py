"""What verify waves and MTP drafts cost beside plain waves, and the rates that follow where drafts
come true as often as wanted: for models without data, on any backend.
`python -m bench.speculation --device` prints it."""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from bench.cpu import BLOCK, Runner, setup
from bench.pace import Server, Tally
from bench.report import Report
from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Draft, Row, RowKind, Wave
from kslserve.ksl.open import open_model
from kslserve.sched.scheduler import Job
from kslserve.sched.spec.policy import SpecPolicy


class Synthetic:
    """An engine whose rows verify drafts that nobody knows to be right."""

    def __init__(self, args: argparse.Namespace, streams: int) -> None:
        self.context, self.tokens = args.context, args.tokens
        self.per_slot = -(-(args.context + args.tokens + 64) // BLOCK)
        pools = PoolSizes(
            streams, streams, streams * self.per_slot, BLOCK, self.per_slot, max(512, 17 * streams)
        )
        with open_model(args.model, weights=args.weights) as model:
            self.engine = NativeEngine.open(
                model.spec, model.tensors, pools, kv_format=args.kv, threads=args.threads,
                test_hooks=True, **args.place,
            )  # fmt: skip
            self.vocab = model.spec.token_limit


async def costs(args: argparse.Namespace, report: Report, streams: int) -> None:
    """Verify waves of n tokens a row, and rounds of MTP drafts, beside plain waves. KV rows and
    state hold whatever they hold, which costs the same. A wave ends with its samples; what the
    device does behind them is in `turn`, from a start to the next, where it makes that wait."""
    made = Synthetic(args, streams)
    runner = Runner(made.engine)
    rng = np.random.default_rng(5)
    wave = Wave(0)
    setup(wave, streams, made.per_slot)
    await runner.run(wave)

    async def take(n: int, propose: int) -> tuple[float, float, float]:
        """Milliseconds of a wave, of its drafts, and from its start to that of the next."""
        times, drafts, starts = [], [], []
        for turn in range(args.waves):
            rows = []
            for slot in range(streams):
                ids = rng.integers(0, made.vocab, n).tolist()
                kind, draft = (
                    (RowKind.LAST, Draft.NONE) if n == 1 else (RowKind.VERIFY, Draft.GIVEN)
                )
                start = made.context + turn
                rows.append(Row(kind, slot, slot, start, n, ids, draft, propose))
            done = await runner.run(Wave(0, rows=rows))
            times.append((done.ended_ns - done.started_ns - done.drafts_ns) / 1e6)
            drafts.append(done.drafts_ns / 1e6)
            starts.append(done.started_ns / 1e6)
        turns = np.diff(starts[3:])
        return statistics.median(times[3:]), statistics.median(drafts[3:]), float(np.median(turns))

    widths = (2, 4, 8, 16)
    plain, _, plain_turn = await take(1, 0)
    taken = {n: await take(n, 0) for n in widths}
    figures = {f"verify_{n}": taken[n][0] / plain for n in widths}
    figures |= {f"turn_{n}": taken[n][2] / plain_turn for n in widths}
    steps = {k: (await take(1, k))[1] for k in (1, 4)}
    report.add(
        "cost", model=args.model, streams=streams, plain_ms=plain, plain_turn_ms=plain_turn,
        **figures,
        first_draft_ms=steps[1], next_draft_ms=(steps[4] - steps[1]) / 3,
        draft_share=steps[1] / plain,
    )  # fmt: skip
    made.engine.close()


async def forced(args: argparse.Namespace, report: Report, streams: int) -> None:
    """Rates of the scheduler where drafts come true as often as wanted."""
    rng = np.random.default_rng(6)
    plain_rate = 0.0
    for rate in (None, 0.0, 0.5, 0.8):
        made = Synthetic(args, streams)
        policy = None if rate is None else SpecPolicy(ngram=False, oracle=rate)
        window = made.per_slot * BLOCK
        server = Server(made.engine, window, policy)
        found: list[Tally] = []
        for _ in range(args.turns):
            jobs = []
            for _ in range(streams):
                prompt = rng.integers(0, made.vocab, min(args.context, 256), dtype=np.int32)
                output = rng.integers(0, made.vocab, args.tokens, dtype=np.int32)
                job = Job(prompt, args.tokens, SamplingParams(temperature=0.0), 1, forced=output)
                jobs.append(job)
            found.append(Tally())
            await server.run(jobs, found[-1])
        del found[0]  # it warmed up
        speed = statistics.median(tally.rate for tally in found)
        plain_rate = plain_rate or speed
        drafted = sum(tally.drafted for tally in found)
        report.add(
            "plain" if rate is None else f"forced_{rate:.0%}", streams=streams, tok_s=speed,
            gain=speed / plain_rate,
            tokens_per_wave=sum(t.sampled for t in found) / sum(t.waves for t in found),
            drafted=drafted, accepted=sum(t.accepted for t in found) / max(drafted, 1),
        )  # fmt: skip
        made.engine.close()


async def device(args: argparse.Namespace, report: Report) -> None:
    for streams in map(int, args.streams.split(",")):
        await costs(args, report, streams)
        await forced(args, report, streams)
