"""Error of int8 activations: teacher-forced distributions beside those of float activations, on the
same weights.

    python -m bench.int8 [--model ksl-nano] [--weights auto] [--tokens 200] [--save]

Texts are greedy continuations of the bundled model's golden prompts, cut to `--tokens`. `kl` is the
mean divergence in nats, `top1` the share of positions with the same best id, `nll` the change of
the mean loss, `worst` the largest divergence of a position.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import numpy.typing as npt

from bench.report import Report
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.native.driver import Driver
from tests.native.objects import ROOT

F64 = npt.NDArray[np.float64]
CHUNK = 64


def texts(tokens: int) -> list[list[int]]:
    items = json.loads((ROOT / "tests/data/nano_golden.json").read_text())["items"]
    return [(item["prompt_ids"] + item["output_ids"])[:tokens] for item in items]


def log_probabilities(model: str, weights: str, activations: str, tokens: int) -> F64:
    """[positions, vocab], of all texts."""
    found = []
    per_slot = -(-tokens // 16)
    with (
        open_model(model, weights=weights) as opened,
        Driver(
            opened.spec, opened.tensors, slots=1, slabs=1, blocks=per_slot,
            blocks_per_slot=per_slot, wave_columns=CHUNK, kv="f32", activations=activations,
            threads=2,
        ) as driver,
    ):  # fmt: skip
        for ids in texts(tokens):
            stream = driver.begin(0)
            for start in range(0, len(ids), CHUNK):
                row = stream.row(RowKind.PREFILL, ids[start : start + CHUNK])
                logits = stream.run(row, ["logits"]).taps["logits"].astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("int8")
    following = [np.array([*ids[1:], -1]) for ids in texts(args.tokens)]
    targets = np.concatenate(following)
    scored = np.flatnonzero(targets >= 0)
    for weights in args.weights.split(","):
        exact = log_probabilities(args.model, weights, "float", args.tokens)
        rounded = log_probabilities(args.model, weights, "auto", args.tokens)
        kl = (np.exp(exact) * (exact - rounded)).sum(axis=1)
        loss = exact[scored, targets[scored]] - rounded[scored, targets[scored]]
        report.add(
            weights, positions=len(kl), kl=float(kl.mean()), worst=float(kl.max()),
            top1=float((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean()),
            nll=float(loss.mean()),
        )  # fmt: skip
    report.write(args.save)


if __name__ == "__main__":
    main()
