"""How often the first MTP draft comes true; `python -m bench.speculation --acceptance` prints it.

`golden_*`: after each of ksl-nano's golden prompts, the draft that the engine makes beside every
sampled token is compared with the token that it samples next, greedily and with the family's
default sampling. `in_answers` counts up to the stop id that ends an answer; `all` goes on behind it
for as many tokens as every prompt gets, where the model rambles. `greedy` is a draft that is the
best token of the MTP head, `shared_noise` one that adds the sampler's own noise to it, which is
what the engine drafts: at temperature 0 both are the same.

`text_*`: over texts that the model did not write, Python and prose of this repository,
teacher-forced: the best token of the MTP head against that of the trunk at the same place, and the
trunk's against the text, which says how foreign the text is.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np

from bench.cpu import BLOCK, Runner, setup
from bench.report import ROOT, Report
from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Ids, Row, RowKind, SlotConfig, Wave
from kslserve.ksl.model import ModelFile
from kslserve.ksl.open import open_model
from kslserve.text.tokenizer import Tokenizer

TEXTS = ("kslserve/sched/scheduler.py", "kslserve/http/reader.py", "ARCHITECTURE.md")
CHUNK = 256


async def acceptance(
    args: Namespace, report: Report, prompts: list[Ids], samplings: dict[str, SamplingParams]
) -> None:
    """prompts: those of `golden_*`; samplings: by name."""
    with open_model(args.model) as model:
        for name, sampling in samplings.items():
            await _after_prompts(args, report, model, prompts, f"golden_{name}", sampling)
        await _over_text(args, report, model)


async def _after_prompts(
    args: Namespace,
    report: Report,
    model: ModelFile,
    prompts: list[Ids],
    name: str,
    sampling: SamplingParams,
) -> None:
    per_slot = -(-(max(map(len, prompts)) + args.tokens + 2) // BLOCK)
    pools = PoolSizes(1, 1, per_slot, BLOCK, per_slot, 512)
    engine = NativeEngine.open(
        model.spec, model.tensors, pools, kv_format="bf16", **args.place
    )  # fmt: skip
    runner = Runner(engine)
    limit, ends = model.spec.token_limit, model.generation.eos_ids
    total, answers = np.zeros(3, int), np.zeros(3, int)  # compared, shared noise, greedy
    for seed, prompt in enumerate(prompts):
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
            outcome = np.array([1, draft == row.tokens[0], best == row.tokens[0]])
            total += outcome
            if not ended:
                answers += outcome
                ended = row.tokens[0] in ends
    report.add(
        name, answer_tokens=int(answers[0]), in_answers_shared_noise=answers[1] / answers[0],
        in_answers_greedy=answers[2] / answers[0], tokens=int(total[0]),
        all_shared_noise=total[1] / total[0], all_greedy=total[2] / total[0],
    )  # fmt: skip
    engine.close()


def _texts() -> dict[str, str]:
    return {path: Path(ROOT, path).read_text() for path in TEXTS}


async def _over_text(args: Namespace, report: Report, model: ModelFile) -> None:
    assert model.tokenizer_json is not None
    tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
    limit = model.spec.token_limit
    for path, text in _texts().items():
        ids = np.array(tokenizer.encode(text), np.int32)
        blocks = -(-len(ids) // BLOCK)
        pools = PoolSizes(1, 1, blocks, BLOCK, blocks, CHUNK)
        engine = NativeEngine.open(
            model.spec, model.tensors, pools, kv_format="bf16", **args.place
        )  # fmt: skip
        runner = Runner(engine)
        wave = Wave(0)
        setup(wave, 1, blocks)
        drafts, own = [], []
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            wave.rows = [Row(RowKind.PREFILL, 0, 0, start, len(part), part)]
            wave.taps = ("logits", "mtp_logits")
            taps = (await runner.run(wave)).taps
            own.append(taps["logits"].reshape(len(part), -1)[:, :limit].argmax(1))
            drafts.append(taps["mtp_logits"].reshape(len(part), -1)[:, :limit].argmax(1))
            wave = Wave(0)
        engine.close()
        draft, token = np.concatenate(drafts), np.concatenate(own)
        # There is no draft for position 1: its row would need a hidden state before the first one.
        report.add(
            f"text_{Path(path).stem.lower()}", tokens=len(ids) - 1,
            draft_is_token=float((draft[1:] == token[1:]).mean()),
            token_is_text=float((token[:-1] == ids[1:]).mean()),
        )  # fmt: skip
