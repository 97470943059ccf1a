"""What speculation gains: tokens per second against plain decode, with the scheduler that serves.

    python -m bench.speculation [--kinds code,chat,random] [--streams 1,2,4,8] [--pairs 9]
                                [--tokens 160] [--speculation auto] [--save]
    python -m bench.speculation --acceptance [--save]
    python -m bench.speculation --device [--model synth:27b] [--weights nvfp4] [--context 2048]
                                [--streams 1,2,4,8] [--backend cuda] [--save]

Each cell runs the same requests plainly and with drafts in turns, on two engines of this process,
and prints the median of the ratios of their rates and its 95 % interval, tokens per wave and row,
and the part of the drafts that came true. Texts: `code` goes on with a file of similar functions,
greedy; `chat` answers the golden prompts with the family's default sampling; `random` samples so
hot from random ids that nothing can be foreseen. `--acceptance` says how often the first MTP draft
is the next token: greedy on the golden prompts, and with default sampling for drafts that share the
sampler's noise and for greedy ones. `--device` is for models without data: what verify waves and
MTP drafts cost beside plain waves, and the rate that follows where 0, 50 and 80 % of the drafts
come true, which is forced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.cpu import BLOCK, Runner, setup
from bench.report import Report
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Draft, Ids, Row, RowKind, SlotConfig, Wave
from kslserve.errors import KslError
from kslserve.ksl.model import ModelFile
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
FUNCTION = """def get_{0}(config):
    value = config.get("{0}")
    if value is None:
        raise KeyError("{0}")
    return value


"""
NAMES = ("host", "port", "user", "path", "timeout", "retries")
POLICIES = {
    "auto": SpecPolicy(),
    "ngram": SpecPolicy(mtp=False),
    "mtp": SpecPolicy(ngram=False),
}


def golden_prompts() -> list[Ids]:
    items = json.loads(GOLDEN.read_text())["items"]
    return [np.array(item["prompt_ids"], np.int32) for item in items]


def jobs_of(kind: str, streams: int, tokens: int, tokenizer: Tokenizer) -> list[Job]:
    rng = np.random.default_rng(7)
    prompts: list[Ids] = []
    for stream in range(streams):
        if kind == "code":
            names = NAMES[stream % 3 :] + NAMES[: stream % 3]
            text = "".join(FUNCTION.format(name) for name in names)
            prompts.append(np.array(tokenizer.encode(text), np.int32))
        elif kind == "chat":
            prompts.append(golden_prompts()[(stream * 5 + 9) % 20])
        else:
            prompts.append(rng.integers(300, 8000, 200, dtype=np.int32))
    return [Job(ids, tokens, SAMPLINGS[kind], seed) for seed, ids in enumerate(prompts)]


class Clock:
    """A sink that notes when its first token came and when it ended."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.ids: list[int] = []
        self.waves = 0

    def admitted(self, cached_tokens: int) -> None:
        pass

    def tokens(self, ids: list[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.ids += ids
        self.waves += 1

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        assert error is None, error


class Server:
    """An engine and its scheduler, for as long as the bench runs."""

    def __init__(self, model: ModelFile, args: argparse.Namespace, policy: SpecPolicy | None):
        per_slot = -(-(600 + args.tokens) // BLOCK)
        pools = PoolSizes(8, 8, 8 * per_slot, BLOCK, per_slot, 512)
        self.engine = NativeEngine.open(
            model.spec, model.tensors, pools, kv_format="bf16", threads=args.threads,
            draft_margin=args.margin,
        )  # fmt: skip
        limits = SchedLimits(8, 64, 512, 50.0, 250.0, 0.0, 0.0, per_slot * BLOCK, spec=policy)
        self.scheduler = Scheduler(self.engine, limits, Metrics())
        self.scheduler.start()
        self.drafted = self.accepted = 0

    async def run(self, jobs: list[Job]) -> tuple[float, list[Clock]]:
        """Tokens per second between the first token of all streams and the last one, and the
        clocks."""
        clocks = [Clock() for _ in jobs]
        sequences = [self.scheduler.submit(j, c) for j, c in zip(jobs, clocks, strict=True)]
        while not self.scheduler.idle:
            await self.scheduler._wait_idle()
        for sequence in sequences:
            if sequence.drafter is not None:
                self.drafted += sequence.drafter.stats.drafted
                self.accepted += sequence.drafter.stats.accepted
        start, end = max(c.first for c in clocks), max(c.last for c in clocks)
        return sum(len(c.ids) - 1 for c in clocks) / (end - start), clocks


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval by order statistics (which covers more from 9 values on)."""
    values = sorted(values)
    n = len(values)
    below = max(0, int(n / 2 - 0.98 * n**0.5))
    return values[n // 2], values[below], values[n - 1 - below]


async def cell(
    report: Report, plain: Server, spec: Server, kind: str, jobs: list[Job], pairs: int
) -> None:
    rates: list[float] = []
    speeds: list[tuple[float, float]] = []
    spec.drafted = spec.accepted = 0
    waves = tokens = 0
    for pair in range(pairs + 1):
        if pair % 2:
            a, one = await plain.run(jobs)
            b, other = await spec.run(jobs)
        else:
            b, other = await spec.run(jobs)
            a, one = await plain.run(jobs)
        assert [c.ids for c in one] == [c.ids for c in other], "speculation changed the output"
        if pair:  # the first one warms up
            rates.append(b / a)
            speeds.append((a, b))
            tokens += sum(len(c.ids) for c in other)
            waves += sum(c.waves for c in other)
    median, low, high = interval(rates)
    report.add(
        kind, streams=len(jobs), gain=median, low=low, high=high,
        plain_tok_s=sorted(a for a, _ in speeds)[pairs // 2],
        spec_tok_s=sorted(b for _, b in speeds)[pairs // 2],
        tokens_per_wave=tokens / waves, drafted=spec.drafted,
        accepted=spec.accepted / max(spec.drafted, 1),
    )  # fmt: skip


async def matrix(args: argparse.Namespace, report: Report) -> None:
    with open_model(args.model) as model:
        assert model.tokenizer_json is not None
        tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
        plain, spec = Server(model, args, None), Server(model, args, POLICIES[args.speculation])
    for kind in args.kinds.split(","):
        for streams in map(int, args.streams.split(",")):
            jobs = jobs_of(kind, streams, args.tokens, tokenizer)
            await cell(report, plain, spec, kind, jobs, args.pairs)
    plain.engine.close()
    spec.engine.close()


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
        limits = SchedLimits(streams, 64, 512, 50.0, 250.0, 0.0, 0.0, window, spec=policy)
        scheduler = Scheduler(made.engine, limits, Metrics())
        scheduler.start()
        speeds, waves, tokens, drafted, accepted = [], 0, 0, 0, 0
        for turn in range(args.turns):
            clocks, sequences = [], []
            for _ in range(streams):
                prompt = rng.integers(0, made.vocab, min(args.context, 256), dtype=np.int32)
                output = rng.integers(0, made.vocab, args.tokens, dtype=np.int32)
                job = Job(prompt, args.tokens, SamplingParams(temperature=0.0), 1, forced=output)
                clocks.append(Clock())
                sequences.append(scheduler.submit(job, clocks[-1]))
            while not scheduler.idle:
                await scheduler._wait_idle()
            begun, ended = max(c.first for c in clocks), max(c.last for c in clocks)
            if turn:  # the first one warms up
                speeds.append(sum(len(c.ids) - 1 for c in clocks) / (ended - begun))
                waves += sum(c.waves for c in clocks)
                tokens += sum(len(c.ids) for c in clocks)
                for sequence in sequences:
                    if sequence.drafter is not None:
                        drafted += sequence.drafter.stats.drafted
                        accepted += sequence.drafter.stats.accepted
        speed = sorted(speeds)[len(speeds) // 2]
        plain_rate = plain_rate or speed
        report.add(
            "plain" if rate is None else f"forced_{rate:.0%}", streams=streams, tok_s=speed,
            gain=speed / plain_rate, tokens_per_wave=tokens / waves, drafted=drafted,
            accepted=accepted / max(drafted, 1),
        )  # fmt: skip
        made.engine.close()


async def device(args: argparse.Namespace, report: Report) -> None:
    for streams in map(int, args.streams.split(",")):
        await costs(args, report, streams)
        await forced(args, report, streams)


async def acceptance(args: argparse.Namespace, report: Report) -> None:
    """First drafts against the tokens that follow, over `tokens` tokens after each prompt."""
    with open_model(args.model) as model:
        per_slot = -(-(600 + args.tokens) // BLOCK)
        pools = PoolSizes(1, 1, per_slot, BLOCK, per_slot, 512)
        engine = NativeEngine.open(model.spec, model.tensors, pools, kv_format="bf16")
    runner = Runner(engine)
    limit, ends = model.spec.token_limit, model.generation.eos_ids
    for name, sampling in (("greedy", SamplingParams(temperature=0.0)), ("family", FAMILY)):
        shared = greedy = total = 0
        in_answer = answer_hits = 0
        for seed, prompt in enumerate(golden_prompts()):
            wave = Wave(0)
            setup(wave, 1, per_slot)
            wave.before[1].data = SlotConfig(sampling, seed)
            wave.rows = [Row(RowKind.LAST, 0, 0, 0, len(prompt), prompt, propose=1)]
            row = (await runner.run(wave)).rows[0]
            ended = False
            for _ in range(args.tokens):
                draft = row.drafts[0]
                step = Row(RowKind.LAST, 0, 0, row.position, 1, [-1], propose=1)
                done = await runner.run(Wave(0, rows=[step], taps=("mtp_logits",)))
                row = done.rows[0]
                # The tap is what the head said of the token that this wave has sampled.
                best = int(np.argmax(done.taps["mtp_logits"][:limit]))
                shared += draft == row.tokens[0]
                greedy += best == row.tokens[0]
                total += 1
                if not ended:
                    in_answer += 1
                    answer_hits += draft == row.tokens[0]
                    ended = row.tokens[0] in ends
        report.add(
            f"first_draft_{name}", tokens=total, shared_noise=shared / total,
            greedy=greedy / total, answer_tokens=in_answer, in_answers=answer_hits / in_answer,
        )  # fmt: skip
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--kinds", default="code,chat,random")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--speculation", choices=POLICIES, default="auto")
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=0)
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
        name, work = "speculation_acceptance", acceptance
    elif args.device:
        name, work = "speculation_device", device
    report = Report(name)
    asyncio.run(work(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
