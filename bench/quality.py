"""Agreement of every weight format, KV format and activation arithmetic with float32 on one model,
teacher-forced over a text.

    python -m bench.quality [--model ksl-nano] [--text FILE] [--tokens 1024] [--chunk 64] [--save]

The reference has the file's own weights (bf16 where it has those), float activations and a float32
cache. The text runs in chunks; positions of the first chunk are not scored, all others read keys
and values of earlier chunks from the cache. A folder with a golden.npz runs over its ids.

`kl`: mean of KL(reference, variant) in nats; `nll`: mean rise of the next token's negative
log-likelihood; `top1`: share of positions with the same best token; `lost`: positions whose KL is
above LOST; `good`: within the gate. `floor` differs from the reference only by the instruction set,
so by the roundings of a fused multiply-add. The controls spoil the cache after every chunk, by
values of zero or by keys and values of two bits, and must miss the gate, or the text says nothing
about caches.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.cpu import Runner, setup
from bench.report import ROOT, Report
from kslserve.engine.budget import KV_OF, kv_problem
from kslserve.engine.model import ModelSpec, PoolSizes
from kslserve.engine.native import NativeEngine, isa_names
from kslserve.engine.types import OpKind, Row, RowKind, StateOp, Wave
from kslserve.errors import ModelFileError, UsageError
from kslserve.ksl.model import ModelFile
from kslserve.ksl.open import open_model
from kslserve.text.tokenizer import Tokenizer

LOST = 0.5  # nats: the model says something else there
GATE_KL, GATE_LOST = 0.03, 0.01  # mean, and share of positions
RING = 256  # of int8ring_int4: a part of the text

F32 = npt.NDArray[np.float32]
Spoil = Callable[[F32, int], None]  # (block image [layers, 2, rows, head_dim], side): in place


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    weights: str = "auto"
    kv: str = "f32"
    activations: str = "float"
    isa: str = "auto"
    spoil: Spoil | None = None


def zero_values(rows: F32, side: int) -> None:
    if side == 1:
        rows[:] = 0


def two_bits(rows: F32, side: int) -> None:
    """Four levels from the lowest to the highest of each 32 channels."""
    groups = rows.reshape(-1, 32)
    low = groups.min(1, keepdims=True)
    step = np.maximum((groups.max(1, keepdims=True) - low) / 3, np.float32(1e-20))
    rows[:] = (np.rint((groups - low) / step) * step + low).reshape(rows.shape)


def variants(spec: ModelSpec, weights: str) -> list[Variant]:
    found = [Variant("floor", isa="scalar")] if len(isa_names()) > 1 else []
    found += [Variant(f"kv_{kv}", kv=kv) for kv in KV_OF["cpu"] if kv != "f32" and usable(spec, kv)]
    found.append(Variant("activations_auto", activations="auto"))
    found += [
        Variant(f"kv_{kv}_auto", kv=kv, activations="auto")
        for kv in KV_OF["cpu"]
        if kv != "f32" and usable(spec, kv)
    ]
    if weights == "bf16":  # what is quantized already is not quantized again
        found += [Variant(f"weights_{name}", weights=name) for name in ("fp6", "nvfp4")]
    found.append(Variant("control_values_zero", spoil=zero_values))
    if spec.head_dim % 32 == 0:
        found.append(Variant("control_two_bits", spoil=two_bits))
    return found


def usable(spec: ModelSpec, kv: str) -> bool:
    return kv_problem(spec, kv) is None


def text_ids(model: ModelFile, args: argparse.Namespace) -> npt.NDArray[np.int32]:
    golden = Path(args.model) / "golden.npz"
    if golden.is_file():
        return np.load(golden)["input_ids"].astype(np.int32)
    if model.tokenizer_json is None:
        raise UsageError(f"{args.model} has no tokenizer: name a model that has one.")
    tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
    ids = tokenizer.encode(Path(args.text).read_text(encoding="utf-8"))
    return np.asarray(ids[: args.tokens], np.int32)


async def log_probabilities(
    model: ModelFile, variant: Variant, ids: npt.NDArray[np.int32], chunk: int
) -> F32:
    """Log-probabilities of the token after each position behind the first chunk, [n, vocab]."""
    spec = model.spec
    blocks = -(-len(ids) // chunk)
    engine = NativeEngine.open(
        spec, model.tensors, PoolSizes(1, 1, blocks, chunk, blocks, chunk, kv_ring=RING),
        kv_format=variant.kv, isa=variant.isa, activations=variant.activations,
    )  # fmt: skip
    runner = Runner(engine)
    image = np.empty(engine.info.block_bytes, np.uint8)
    wave = Wave(0)
    setup(wave, 1, blocks)
    found = []
    for block in range(blocks):
        part = ids[block * chunk : (block + 1) * chunk]
        wave.rows = [Row(RowKind.PREFILL, 0, 0, block * chunk, len(part), part)]
        wave.taps = ("logits",)
        logits = (await runner.run(wave)).taps["logits"].reshape(len(part), -1)
        wave = Wave(0)
        if block:
            found.append(log_softmax(logits[:, : spec.token_limit]))
        if variant.spoil is not None:
            await runner.run(Wave(0, after=[StateOp(OpKind.SAVE_BLOCK, block, data=image)]))
            planes = image.view(np.float32).reshape(-1, 2, chunk * spec.kv_heads, spec.head_dim)
            for side in (0, 1):
                for plane in planes[:, side]:
                    variant.spoil(plane, side)
            wave.before = [StateOp(OpKind.LOAD_BLOCK, block, data=image)]
    engine.close()
    return np.concatenate(found)


def log_softmax(logits: F32) -> F32:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))).astype(np.float32)


def agreement(reference: F32, found: F32, following: npt.NDArray[np.int32]) -> dict[str, float]:
    """following: the token after each position, for all but the last."""
    kl = (np.exp(reference.astype(np.float64)) * (reference - found)).sum(axis=1)
    at = np.arange(len(following))
    lost = int((kl > LOST).sum())
    return {
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "nll": float((reference[at, following] - found[at, following]).mean()),
        "top1": float((reference.argmax(1) == found.argmax(1)).mean()),
        "lost": lost,
        "good": int(kl.mean() <= GATE_KL and lost <= GATE_LOST * len(kl)),
    }


def open_reference(path: str) -> ModelFile:
    """The model in bf16, or as it is where it is quantized already."""
    try:
        return open_model(path, weights="bf16", head="bf16")
    except ModelFileError:
        return open_model(path)


def run(args: argparse.Namespace, report: Report) -> list[str]:
    """Measure and report every variant; names of the controls that pass the gate."""
    with open_reference(args.model) as model:
        ids = text_ids(model, args)
        chunk = min(args.chunk, len(ids) // 4 // 16 * 16)
        following = ids[chunk + 1 :]
        reference = asyncio.run(log_probabilities(model, Variant("reference"), ids, chunk))
        at = np.arange(len(following))
        report.add(
            "reference", model=args.model, weights=model.weights, positions=len(reference),
            chunk=chunk, nll=float(-reference[at, following].mean()),
        )  # fmt: skip
        blind = []
        for variant in variants(model.spec, model.weights):
            found = score(model, variant, ids, chunk, args.model)
            row = agreement(reference, found, following)
            report.add(variant.name, **row)
            if variant.spoil is not None and row["good"]:
                blind.append(variant.name)
    return blind


def score(
    model: ModelFile, variant: Variant, ids: npt.NDArray[np.int32], chunk: int, path: str
) -> F32:
    if variant.weights == "auto":
        return asyncio.run(log_probabilities(model, variant, ids, chunk))
    with open_model(path, weights=variant.weights) as other:
        return asyncio.run(log_probabilities(other, variant, ids, chunk))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--text", default=str(ROOT / "ARCHITECTURE.md"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(arguments)
    kept = Path(args.model).name
    report = Report("quality" if kept == "ksl-nano" else f"quality_{kept}")
    blind = run(args, report)
    report.write(args.save)
    if blind:
        sys.exit(f"{', '.join(blind)} passed the gate: this text does not test the cache")


if __name__ == "__main__":
    main()
