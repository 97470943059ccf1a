"""What speculation gains: tokens per second against plain decode, with the scheduler that serves.

    python -m bench.speculation [--kinds code,chat,random,head] [--streams 1,2,4,8] [--rounds 9]
                                [--most 27] [--tokens 192] [--batches 8] [--speculation auto]
                                [--backend cpu] [--save]
    python -m bench.speculation --acceptance [--tokens 192] [--backend cpu] [--save]
    python -m bench.speculation --device [--model synth:27b] [--weights nvfp4] [--context 2048]
                                [--streams 1,2,4,8] [--backend cuda] [--save]

Each cell runs the same batches of requests plainly and with drafts. Both go through one engine, so
that nothing else of this process has a core: two schedulers take turns, batch by batch. A round is
one batch, run plainly, with drafts and plainly again, since machines change their pace from second
to second: what changes evenly is the same for both. The cell prints the median of the rounds'
ratios of tokens per second and its 95 % interval, tokens per wave and row, and the part of the
drafts that came true. `null_low` and `null_high` are such an interval of the first plain runs
against the second ones: what says no more than that is noise. The rounds before the first one that
counts warm up, as a server would be. How far the plain runs of these lie apart says how many rounds
the cell gets, before any of them is run: as many as should make the interval narrow enough to see
a loss of 3 %, at least `--rounds` and at most `--most`; three times as many in cells where drafts
gain little, `random`, `head` and `chat` of four streams and more: there the interval decides.

Texts: `code` goes on with boilerplate that is in its context twice, greedily; `chat` answers the
golden prompts with the family's default sampling, and goes on where they end; `random` samples so
hot from random ids that nothing can be foreseen. Both sides of these run with the MTP head, whose
keys and values follow every position; `head` is what that costs: plain decode of the random text by
an engine with the head, and by one as `--speculation off` opens it. `--acceptance`: see
bench/drafts.py. `--device` is for models without data: what verify waves and MTP drafts cost beside
plain waves, and the rate that follows where 0, 50 and 80 % of the drafts come true (forced).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path

import numpy as np

from bench.cpu import BLOCK
from bench.drafts import acceptance
from bench.pace import Round, Server, Tally, Turn, Turns, interval, rounds_for
from bench.report import Report
from bench.verify import device
from kslserve.core.sampling import SamplingParams
from kslserve.engine.cuda import load_library
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Ids
from kslserve.ksl.model import ModelFile
from kslserve.ksl.open import open_model
from kslserve.ksl.synth import PREFIX
from kslserve.sched.scheduler import Job
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.startup.speculation import leave_head
from kslserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "tests/data/nano_golden.json"
FAMILY = SamplingParams(temperature=1.0, top_k=20, top_p=0.95)
SAMPLINGS = {
    "code": SamplingParams(temperature=0.0),
    "chat": FAMILY,
    "random": SamplingParams(temperature=2.0),
    "head": SamplingParams(temperature=2.0),
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
WARM_UP = 8  # rounds of a cell
EVEN = 3  # times as many rounds where drafts gain little
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


async def run_round(plain: Server, spec: Server, jobs: list[Job]) -> tuple[Round, int]:
    """And how many of its texts were equal."""
    found = Round(Tally(), Tally(), Tally())
    ids = await plain.run(jobs, found.before)
    same = await spec.run(jobs, found.drafts)
    await plain.run(jobs, found.after)
    return found, sum(a == b for a, b in zip(ids, same, strict=True))


async def cell(
    report: Report,
    plain: Server,
    spec: Server,
    kind: str,
    batches: list[list[Job]],
    args: argparse.Namespace,
    exact: bool,
) -> None:
    """exact: the engine gives equal bits at any width, so both must say the same."""
    streams, equal = len(batches[0]), 0

    async def run(begin: int, end: int) -> list[Round]:
        nonlocal equal
        found = []
        for number in range(begin, end):
            result, same = await run_round(plain, spec, batches[number % len(batches)])
            assert not exact or same == streams, "speculation changed the output"
            equal += same
            found.append(result)
        return found

    nulls = [one.null for one in await run(0, WARM_UP)]
    times = EVEN if kind in ("random", "head") or (kind == "chat" and streams >= 4) else 1
    count = rounds_for(nulls, times * args.rounds, times * args.most)
    found = await run(WARM_UP, WARM_UP + count)
    median, low, high = interval([one.gain for one in found])
    _, null_low, null_high = interval([one.null for one in found])
    drafts = [one.drafts for one in found]
    drafted = sum(tally.drafted for tally in drafts)
    report.add(
        kind, streams=streams, gain=median, low=low, high=high,
        null_low=null_low, null_high=null_high, rounds=count,
        plain_tok_s=statistics.median(one.before.rate for one in found),
        spec_tok_s=statistics.median(tally.rate for tally in drafts),
        tokens_per_wave=sum(t.sampled for t in drafts) / sum(t.waves for t in drafts),
        drafted=drafted, accepted=sum(t.accepted for t in drafts) / max(drafted, 1),
        **({} if exact else {"equal_texts": equal / (streams * (WARM_UP + count))}),
    )  # fmt: skip


def open_engine(model: ModelFile, args: argparse.Namespace, most: int, blocks: int) -> Turns:
    """For so many streams of so many blocks each."""
    engine = NativeEngine.open(
        model.spec, model.tensors, PoolSizes(most, most, most * blocks, BLOCK, blocks, 512),
        kv_format="bf16", threads=args.threads, nice=args.nice, draft_margin=args.margin,
        **args.place,
    )  # fmt: skip
    return Turns(engine)


async def matrix(args: argparse.Namespace, report: Report) -> None:
    streams, kinds = [int(n) for n in args.streams.split(",")], args.kinds.split(",")
    blocks = -(-(600 + args.tokens) // BLOCK)
    context = blocks * BLOCK
    with open_model(args.model) as model:
        assert model.tokenizer_json is not None
        tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
        turns = [open_engine(model, args, max(streams), blocks)]
        plain = Server(Turn(turns[0]), context, None)
        sides = [plain, Server(Turn(turns[0]), context, POLICIES[args.speculation])]
        if "head" in kinds:
            leave_head(model)
            turns.append(open_engine(model, args, max(streams), blocks))
            headless = Server(Turn(turns[1]), context, None)
    equality = turns[0].engine.info.equality
    exact = equality.batch.bit and equality.speculation.bit
    for kind in kinds:
        pair = [headless, plain] if kind == "head" else sides
        for n in streams:
            count = max(2, args.batches // n)  # so that warming up takes little longer
            batches = batches_of(kind, n, args.tokens, count, tokenizer)
            await cell(report, *pair, kind, batches, args, exact)
    for turn in turns:
        turn.engine.close()


async def golden_acceptance(args: argparse.Namespace, report: Report) -> None:
    samplings = {"greedy": SamplingParams(temperature=0.0), "family": FAMILY}
    await acceptance(args, report, golden_prompts(), samplings)


def model_of(wanted: str | None, device: bool) -> str:
    """The model of this run; SystemExit where the one that is wanted says nothing in it."""
    if wanted is None:
        return f"{PREFIX}27b" if device else "ksl-nano"
    if device and not wanted.startswith(PREFIX):
        raise SystemExit(f"--device is for models without data ({PREFIX}27b), not {wanted}.")
    if wanted.startswith(PREFIX) and not device:
        raise SystemExit(f"{wanted} has no data: what it drafts is seen with --device only.")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--kinds", default="code,chat,random,head")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most", type=int, default=27)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--speculation", choices=POLICIES, default="auto")
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--backend", choices=("cuda", "cpu"))
    parser.add_argument("--weights")
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
    args.model = model_of(args.model, args.device)
    args.weights = args.weights or ("nvfp4" if args.device else "auto")
    args.backend = args.backend or ("cuda" if work is device else "cpu")
    args.place = {"library": load_library()} if args.backend == "cuda" else {}
    if args.place and work is not device:
        name += "_cuda"
    report = Report(name)
    asyncio.run(work(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
