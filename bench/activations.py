"""What activation arithmetic of the CUDA backend costs in the distribution of the next token.

    python -m bench.activations [--model ksl-nano] [--save]

Every position of the golden sequences of the bundled model (of random ids for another model) is
scored in waves of at most 64 columns, whose activations carry 22 bits, and in waves of 512: with
halves and, for FP6 weights, with e4m3. Figures are the mean and the 99th percentile of the
Kullback-Leibler divergence from the 22-bit logits of the same weights, and the share of positions
whose best id changes. The last row is what NVFP4 weights cost against FP6, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.decode import BLOCK
from bench.report import ROOT, Report
from kslserve.core.sampling import SamplingParams
from kslserve.engine import codecs
from kslserve.engine.cuda import load_library
from kslserve.engine.model import PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import OpKind, Row, RowKind, SlotConfig, StateOp, TableEdit
from kslserve.ksl.layout import HEAD
from kslserve.ksl.open import open_model
from kslserve.selftest.waves import Waves

F64 = npt.NDArray[np.float64]
MOST = 512


def sequences(model: str) -> list[list[int]]:
    if model != "ksl-nano":
        random = np.random.default_rng(1)
        return [random.integers(0, 256, 400).tolist() for _ in range(8)]
    golden = json.loads((ROOT / "tests/data/nano_golden.json").read_text(encoding="utf-8"))
    found = [item["prompt_ids"] + item["output_ids"] for item in golden["items"]]
    return [ids for ids in found if len(ids) > 200]


async def score(engine: NativeEngine, ids: list[int], columns: int, vocab: int) -> F64:
    """Log-probabilities [len(ids), vocab] after every position."""
    runner = Waves(engine)
    config = SlotConfig(SamplingParams(temperature=0.0), 0)
    blocks = list(range(-(-len(ids) // BLOCK)))
    await runner.run(
        before=[StateOp(OpKind.ZERO_SLAB, 0), StateOp(OpKind.CONFIGURE, 0, data=config)],
        edits=[TableEdit(0, 0, blocks)],
    )
    parts = []
    for start in range(0, len(ids), columns):
        part = ids[start : start + columns]
        row = Row(RowKind.PREFILL, 0, 0, start, len(part), part)
        done = await runner.run(rows=[row], taps=("logits",))
        parts.append(done.taps["logits"].reshape(len(part), vocab))
    logits = np.concatenate(parts).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def whole(tensor: TensorArg) -> TensorArg:
    """A tensor with its values in memory."""
    if tensor.read is None:
        return tensor
    parts = list(tensor.read(0, tensor.rows))
    joined = [
        None if column[0] is None else np.concatenate([np.ravel(part) for part in column])
        for column in zip(*parts, strict=True)
    ]
    data, scales, globals_ = joined
    return replace(tensor, read=None, data=data, scales=scales, globals_=globals_)


def as_nvfp4(tensor: TensorArg) -> TensorArg:
    """An FP6 matrix of a layer, with its values in memory, in NVFP4; other tensors as they are."""
    if tensor.encoding != codecs.ENC_E2M3 or tensor.name == HEAD:
        return tensor
    rows, cols = tensor.rows, tensor.cols
    values = codecs.decode(tensor.encoding, tensor.data, tensor.scales, None, rows, cols)
    made = codecs.encode(codecs.ENC_NVFP4, values)
    return TensorArg(
        tensor.name, codecs.ENC_NVFP4, rows, cols, made.codes, made.scales, made.globals
    )


def run(model: str, nvfp4: bool, activations: str, columns: int) -> F64:
    with open_model(model, weights="fp6") as opened:
        tensors = [as_nvfp4(whole(t)) for t in opened.tensors] if nvfp4 else opened.tensors
        blocks = 2048 // BLOCK
        sizes = PoolSizes(
            slots=1, slabs=1, blocks=blocks, block_tokens=BLOCK, blocks_per_slot=blocks,
            wave_columns=MOST,
        )  # fmt: skip
        found = []
        for ids in sequences(model):
            engine = NativeEngine.open(
                opened.spec, tensors, sizes, kv_format="f32", activations=activations,
                library=load_library(),
            )  # fmt: skip
            found.append(asyncio.run(score(engine, ids, columns, opened.spec.vocab)))
            engine.close()
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    name = "activations" if args.model == "ksl-nano" else f"activations_{Path(args.model).name}"
    report = Report(name)

    def add(row: str, base: F64, found: F64) -> None:
        divergence = (np.exp(base) * (base - found)).sum(axis=1)
        report.add(
            row,
            kl=float(divergence.mean()),
            kl_p99=float(np.percentile(divergence, 99)),
            changed=float((base.argmax(axis=1) != found.argmax(axis=1)).mean()),
            positions=len(base),
        )

    fp6 = run(args.model, False, "float", 64)
    nvfp4 = run(args.model, True, "float", 64)
    add("fp6_half", fp6, run(args.model, False, "float", MOST))
    add("fp6_e4m3", fp6, run(args.model, False, "auto", MOST))
    add("nvfp4_half", nvfp4, run(args.model, True, "auto", MOST))
    add("nvfp4_weights", fp6, nvfp4)
    report.write(args.save)


if __name__ == "__main__":
    main()
