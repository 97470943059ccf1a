"""What speculation gains: tokens per second against plain decode, with the scheduler that serves.

    python -m bench.speculation [--kinds code,chat,random] [--streams 1,2,4,8] [--pairs 15]
                                [--tokens 192] [--batches 4] [--speculation auto] [--save]
    python -m bench.speculation --acceptance [--tokens 64] [--save]
    python -m bench.speculation --device [--model synth:27b] [--weights nvfp4] [--context 2048]
                                [--streams 1,2,4,8] [--backend cuda] [--save]

Each cell runs the same batches of requests plainly and with drafts. Both go through one engine, so
that nothing else of this process has a core: two schedulers take turns, batch by batch, and who
goes first changes. A pair is one pass over the batches; the cell prints the median of the pairs'
ratios of tokens per second and its 95 % interval, tokens per wave and row, and the part of the
drafts that came true. The pairs before the first one that counts warm up, as a server would be.

Texts: `code` goes on with boilerplate that is in its context twice, greedily; `chat` answers the
golden prompts with the family's default sampling, and goes on where they end; `random` samples so
hot from random ids that nothing can be foreseen. `--acceptance`: see bench/drafts.py. `--device` is
for models without data: what verify waves and MTP drafts cost beside plain waves, and the rate that
follows where 0, 50 and 80 % of the drafts come true, which is forced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.cpu import BLOCK, Runner, setup
from bench.drafts import acceptance
from bench.report import Report
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Done, Draft, Engine, Ids, Row, RowKind, Wave
from kslserve.errors import KslError
from kslserve.ksl.open import open_model
from kslserve.metrics import Metrics
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "tests/data/nano_golden.json"
FAMILY = SamplingParams(temperature=1.0, top_k=20, top_p=0.95)
SAMPLINGS = {
    "code": SamplingParams(temperature=0.0),
    "chat": FAMILY,
    "random": SamplingParams(temperature=2.0),
}
BOILERPLATE = (
    """def get_{0}(config):
    value = config.get("{0}")
    if value is None:
        raise KeyError("{0}")
    return value


""",
    """def set_{0}(config, value):
    if value is None:
        raise ValueError("{0}")
    config["{0}"] = value


""",
    """    @property
    def {0}(self):
        return self._{0}

""",
    """    elif name == "{0}":
        return self.{0}
""",
)
NAMES = ("host", "port", "user", "path", "timeout", "retries")
WARM_UP = 2  # pairs
POLICIES = {
    "auto": SpecPolicy(),
    "ngram": SpecPolicy(mtp=False),
    "mtp": SpecPolicy(ngram=False),
}


def golden_prompts() -> list[Ids]:
    items = json.loads(GOLDEN.read_text())["items"]
    return [np.array(item["prompt_ids"], np.int32) for item in items]


def batches_of(
    kind: str, streams: int, tokens: int, batches: int, tokenizer: Tokenizer
) -> list[list[Job]]:
    """Jobs that run together, for each batch. A cell of more streams has those of fewer, and
    further ones."""
    rng = np.random.default_rng(7)
    golden, found = golden_prompts(), []
    for batch in range(batches):
        jobs = []
        for stream in range(streams):
            number = batch + stream * (batches + 1)
            if kind == "code":
                turn = number // len(BOILERPLATE) % len(NAMES)
                piece = BOILERPLATE[number % len(BOILERPLATE)]
                text = "".join(piece.format(name) for name in NAMES[turn:] + NAMES[:turn])
                prompt = np.array(tokenizer.encode(2 * text), np.int32)
            elif kind == "chat":
                prompt = golden[number % len(golden)]
            else:
                prompt = rng.integers(300, 8000, 200, dtype=np.int32)
            jobs.append(Job(prompt, tokens, SAMPLINGS[kind], number))
        found.append(jobs)
    return found


class Clock:
    """A sink that notes when tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of the waves that sampled for it
        self.counts: list[int] = []
        self.ids: list[int] = []

    def admitted(self, cached_tokens: int) -> None:
        pass

    def tokens(self, ids: Items[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(len(ids))
        self.ids += ids

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        assert error is None, error


def pace(clocks: list[Clock]) -> tuple[int, float]:
    """Tokens after the wave that gave the last stream its first one, and the seconds they took."""
    start = max(clock.times[0] for clock in clocks)
    end = max(clock.times[-1] for clock in clocks)
    tokens = sum(
        count
        for clock in clocks
        for at, count in zip(clock.times, clock.counts, strict=True)
        if at > start
    )
    return tokens, end - start


class Turns:
    """One engine for several schedulers, of which one has work at a time."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.on_done: Callable[[Done], None] | None = None
        engine.start(self._done)

    def _done(self, done: Done) -> None:
        assert self.on_done is not None
        self.on_done(done)


class Turn:
    """The engine as one of the schedulers sees it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._on_done: Callable[[Done], None] | None = None
        self.info = turns.engine.info
        self.progress, self.close = turns.engine.progress, turns.engine.close

    def start(self, on_done: Callable[[Done], None]) -> None:
        self._on_done = on_done

    def submit(self, wave: Wave) -> bool:
        self._turns.on_done = self._on_done
        return self._turns.engine.submit(wave)


@dataclass(slots=True)
class Tally:
    """What the batches of one side of a pair took."""

    tokens: int = 0
    seconds: float = 0.0
    sampled: int = 0
    waves: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Server:
    """A scheduler, for as long as the bench runs."""

    def __init__(self, engine: Engine, context: int, policy: SpecPolicy | None) -> None:
        info = engine.info
        self.scheduler = Scheduler(
            engine,
            SchedLimits(info.slots, 64, 512, 50.0, 250.0, 0.0, 0.0, context, spec=policy),
            Metrics(),
        )
        self.scheduler.start()

    async def run(self, jobs: list[Job], tally: Tally) -> list[list[int]]:
        """Run jobs together; what each of them sampled."""
        clocks = [Clock() for _ in jobs]
        sequences = [self.scheduler.submit(j, c) for j, c in zip(jobs, clocks, strict=True)]
        while not self.scheduler.idle:
            await self.scheduler._wait_idle()
        for sequence in sequences:
            if sequence.drafter is not None:
                tally.drafted += sequence.drafter.stats.drafted
                tally.accepted += sequence.drafter.stats.accepted
        tokens, seconds = pace(clocks)
        tally.tokens += tokens
        tally.seconds += seconds
        tally.sampled += sum(len(c.ids) for c in clocks)
        tally.waves += sum(len(c.times) for c in clocks)
        return [c.ids for c in clocks]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval by order statistics (which covers more from 9 values on)."""
    values = sorted(values)
    n = len(values)
    below = max(0, int(n / 2 - 0.98 * n**0.5))
    return statistics.median(values), values[below], values[n - 1 - below]


async def cell(
    report: Report, plain: Server, spec: Server, kind: str, batches: list[list[Job]], pairs: int
) -> None:
    found: list[tuple[Tally, Tally]] = []
    for pair in range(WARM_UP + pairs):
        one, other = Tally(), Tally()
        for number, jobs in enumerate(batches):
            if (pair + number) % 2:
                ids = await plain.run(jobs, one)
                same = await spec.run(jobs, other)
            else:
                same = await spec.run(jobs, other)
                ids = await plain.run(jobs, one)
            assert ids == same, "speculation changed the output"
        if pair >= WARM_UP:
            found.append((one, other))
    median, low, high = interval([b.rate / a.rate for a, b in found])
    drafted = sum(b.drafted for _, b in found)
    report.add(
        kind, streams=len(batches[0]), gain=median, low=low, high=high,
        plain_tok_s=statistics.median(a.rate for a, _ in found),
        spec_tok_s=statistics.median(b.rate for _, b in found),
        tokens_per_wave=sum(b.sampled for _, b in found) / sum(b.waves for _, b in found),
        drafted=drafted, accepted=sum(b.accepted for _, b in found) / max(drafted, 1),
    )  # fmt: skip


async def matrix(args: argparse.Namespace, report: Report) -> None:
    streams = [int(n) for n in args.streams.split(",")]
    per_slot = -(-(600 + args.tokens) // BLOCK)
    most = max(streams)
    with open_model(args.model) as model:
        assert model.tokenizer_json is not None
        tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
        engine = NativeEngine.open(
            model.spec, model.tensors,
            PoolSizes(most, most, most * per_slot, BLOCK, per_slot, 512),
            kv_format="bf16", threads=args.threads, nice=args.nice, draft_margin=args.margin,
        )  # fmt: skip
    turns = Turns(engine)
    plain = Server(Turn(turns), per_slot * BLOCK, None)
    spec = Server(Turn(turns), per_slot * BLOCK, POLICIES[args.speculation])
    for kind in args.kinds.split(","):
        for n in streams:
            batches = batches_of(kind, n, args.tokens, args.batches, tokenizer)
            await cell(report, plain, spec, kind, batches, args.pairs)
    engine.close()


class Synthetic:
    """An engine whose rows verify drafts that nobody knows to be right."""

    def __init__(self, args: argparse.Namespace, streams: int) -> None:
        library = None
        if args.backend == "cuda":
            from kslserve.engine.cuda import load_library

            library = load_library()
        self.context, self.tokens = args.context, args.tokens
        self.per_slot = -(-(args.context + args.tokens + 64) // BLOCK)
        pools = PoolSizes(
            streams, streams, streams * self.per_slot, BLOCK, self.per_slot, max(512, 17 * streams)
        )
        with open_model(args.model, weights=args.weights) as model:
            more: dict[str, Any] = {} if library is None else {"library": library}
            self.engine = NativeEngine.open(
                model.spec, model.tensors, pools, kv_format=args.kv, threads=args.threads,
                test_hooks=True, **more,
            )  # fmt: skip
            self.vocab = model.spec.token_limit


async def costs(args: argparse.Namespace, report: Report, streams: int) -> None:
    """Verify waves of n tokens a row, and rounds of MTP drafts, beside plain waves. KV rows and
    state hold whatever they hold, which costs the same."""
    made = Synthetic(args, streams)
    runner = Runner(made.engine)
    rng = np.random.default_rng(5)
    wave = Wave(0)
    setup(wave, streams, made.per_slot)
    await runner.run(wave)

    async def take(n: int, propose: int) -> tuple[float, float]:
        times, drafts = [], []
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
        return statistics.median(times[3:]), statistics.median(drafts[3:])

    plain, _ = await take(1, 0)
    figures = {f"verify_{n}": (await take(n, 0))[0] / plain for n in (2, 4, 8, 16)}
    steps = {k: (await take(1, k))[1] for k in (1, 4)}
    report.add(
        "cost", streams=streams, plain_ms=plain, **figures, first_draft_ms=steps[1],
        next_draft_ms=(steps[4] - steps[1]) / 3, draft_share=steps[1] / plain,
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


async def golden_acceptance(args: argparse.Namespace, report: Report) -> None:
    samplings = {"greedy": SamplingParams(temperature=0.0), "family": FAMILY}
    await acceptance(args, report, golden_prompts(), samplings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--kinds", default="code,chat,random")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--speculation", choices=POLICIES, default="auto")
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="q4")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--waves", type=int, default=15)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    name, work = "speculation", matrix
    if args.acceptance:
        name, work = "speculation_acceptance", golden_acceptance
    elif args.device:
        name, work = "speculation_device", device
    report = Report(name)
    asyncio.run(work(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
