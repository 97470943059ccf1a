"""A backend against the scalar reference of the CPU: the logits of rows of every kind; and, as it
is served, against itself; what it samples and copies.

Both engines get the same ids, so that a difference shows where it arises and grows no further than
one sequence. The reference computes in float32, on weights decoded exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Draft, EngineInfo, Row, RowKind
from kslserve.selftest import chosen, moved, served
from kslserve.selftest.waves import Ids, Waves, given

SIZES = PoolSizes(
    slots=6, slabs=6, blocks=192, block_tokens=16, blocks_per_slot=32, wave_columns=384
)
LONG = (
    300  # columns of the long prompt: several tiles of every kernel, none of them full at the end
)
SHORT = ("decode", "decode of 5", "drafts")
FORMS = (2, 3, 12, 40, 65)
STEPS = 10
DRAFTS = 7
# Relative L2 distance of logits after four layers. A wrong lane, scale or sign is of the order of
# 1, one lane of 32 a quarter. Exact arithmetic differs by the order of its sums, one in halves by a
# few thousandths, one in two e2m1 terms, of values as random as these, by up to a tenth, int8 by a
# tenth, e4m3 by two. That may hide a lane; the first product of the first layer does not, which no
# rounding moves by more than a few hundredths.
EXACT, HALVES, TERMS, INT8, E4M3 = 1e-3, 0.02, 0.2, 0.2, 0.4
PRODUCTS, PRODUCT = "first product", 0.06
FIRST = "layers.0.gdn_qkv"

Opener = Callable[[ModelSpec, list[TensorArg], PoolSizes], NativeEngine]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parity:
    """rows: how the columns were computed. error: relative L2 distance of their logits. limit: of
    what is right. same_best: share of columns whose best id is the reference's. Of what has to be
    equal: shares of bytes or ids that differ, and that do not."""

    rows: str
    error: float
    limit: float
    same_best: float

    @property
    def right(self) -> bool:
        return self.error <= self.limit


def compare(
    subject: Opener, reference: Opener, spec: ModelSpec, tensors: list[TensorArg], seed: int
) -> list[Parity]:
    """Both engines over one script. Raises what opening and running an engine raises."""
    ids = np.random.default_rng(seed).integers(0, spec.token_limit, LONG + 64).astype(np.int32)
    engine = subject(spec, tensors, SIZES)
    info = engine.info
    found, same = asyncio.run(_subject(engine, ids, spec))
    expected = asyncio.run(_reference(reference(spec, tensors, SIZES), ids))
    near = [_distance(rows, found[rows], expected[rows], limit(info, rows)) for rows in expected]
    return near + [Parity(s.what, s.differing, 0.0, 1.0 - s.differing) for s in same]


def limit(info: EngineInfo, rows: str) -> float:
    """The distance up to which rows of a kind are right. A device may round more in wide waves."""
    if rows == PRODUCTS:
        return min(limit(info, "prompt"), PRODUCT)
    if rows not in SHORT and info.isa.startswith("sm_"):
        if "e4m3" in info.activation:
            return E4M3
        return TERMS if "2xe2m1" in info.activation else HALVES
    if info.activation == "float":
        return EXACT
    return HALVES if info.activation.startswith("f16") else INT8


def _distance(rows: str, found: F32, expected: F32, limit: float) -> Parity:
    if found.shape != expected.shape or not np.isfinite(found).all():
        return Parity(rows, float("inf"), limit, 0.0)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    same = float(np.mean(found.argmax(axis=1) == expected.argmax(axis=1)))
    return Parity(rows, error, limit, same)


async def _subject(
    engine: NativeEngine, ids: Ids, spec: ModelSpec
) -> tuple[dict[str, F32], list[served.Sameness]]:
    with Waves(engine) as waves:
        logits = await _logits(waves, ids)
        same = await served.compare(waves, ids)
        same += await chosen.compare(waves, ids, spec)
        return logits, same + await moved.compare(waves, ids)


async def _reference(engine: NativeEngine, ids: Ids) -> dict[str, F32]:
    with Waves(engine) as waves:
        return await _logits(waves, ids)


async def _logits(waves: Waves, ids: Ids) -> dict[str, F32]:
    """Logits [columns, vocab] by kind of row, and what the first product gave [columns, width]."""
    vocab = waves.engine.info.vocab
    out: dict[str, list[F32]] = {}

    def keep(rows: str, tap: F32, columns: int = 1) -> None:
        width = vocab if rows != PRODUCTS else len(tap) // columns
        out.setdefault(rows, []).append(tap.reshape(-1, width).copy())

    await waves.begin(range(6))
    # One sequence token by token; then five at once.
    for at in range(STEPS):
        done = await waves.run(rows=[given(0, at, ids[at : at + 1])], taps=("logits",))
        keep("decode", done.taps["logits"])
    for at in range(STEPS):
        rows = [given(slot, at, ids[at + slot : at + slot + 1]) for slot in range(1, 6)]
        done = await waves.run(rows=rows, taps=("logits",))
        keep("decode of 5", done.taps["logits"])
    drafts = ids[STEPS : STEPS + 1 + DRAFTS]
    row = Row(RowKind.VERIFY, 0, 0, STEPS, len(drafts), drafts, draft=Draft.GIVEN)
    done = await waves.run(rows=[row], taps=("logits",))
    keep("drafts", done.taps["logits"])
    # The forms of matrix kernels: by the number of columns.
    for n in FORMS:
        await waves.begin([0])
        done = await waves.run(rows=[given(0, 0, ids[:n])], taps=("logits", FIRST))
        keep("short prompts", done.taps["logits"])
        keep(PRODUCTS, done.taps[FIRST], n)
    await waves.begin([0, 1])
    done = await waves.run(rows=[given(0, 0, ids[:LONG])], taps=("logits",))
    keep("prompt", done.taps["logits"])
    rows = [given(0, LONG, ids[LONG : LONG + 41]), given(1, 0, ids[:1])]
    done = await waves.run(rows=rows, taps=("logits",))
    keep("prompt beside decode", done.taps["logits"])
    return {rows: np.concatenate(parts) for rows, parts in out.items()}
