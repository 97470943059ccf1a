"""The properties of the determinism contract as experiments: positions whose logits are computed in
two ways, the second that of the property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from _kslserve import lib

from kslserve.engine.types import Draft, Ids, OpKind, Row, RowKind, StateOp
from tests.closeness import divergence, relative
from tests.native.driver import Driver, Stream

F32 = npt.NDArray[np.float32]
CUT_SLAB = 9
DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """Logits [positions, vocab] of both ways."""

    plain: F32
    other: F32

    @property
    def equal(self) -> bool:
        return self.plain.tobytes() == self.other.tobytes()

    @property
    def distance(self) -> float:
        """Relative L2."""
        return relative(self.other, self.plain)

    @property
    def divergence(self) -> float:
        """Mean KL(plain || other) in nats."""
        return divergence(self.plain, self.other)


def run(stream: Stream, ids: Ids, plan: Sequence[int], beside: Sequence[Row] = ()) -> F32:
    """Logits of ids as rows of these lengths (the last takes the rest), each in a wave with other
    rows behind it."""
    driver, at = stream.driver, 0
    out = [np.empty((0, driver.spec.vocab), np.float32)]
    for n in [*plan, len(ids)]:
        part = ids[at : at + n]
        if not len(part):
            break
        result = driver.wave([stream.row(RowKind.PREFILL, part), *beside], taps=["logits"])
        stream.position = result.rows[0].position
        out.append(result.taps["logits"].reshape(-1, driver.spec.vocab)[: len(part)].copy())
        at += len(part)
    return np.concatenate(out)


def copied(driver: Driver, slot: int, of: Stream, slab: int, position: int) -> Stream:
    """A sequence that begins with the state in `slab` and the blocks of another."""
    stream = driver.begin(slot)
    used = range(-(-position // driver.block_tokens))
    blocks = [StateOp(OpKind.COPY_BLOCK, of.blocks[i], stream.blocks[i]) for i in used]
    driver.wave(before=[StateOp(OpKind.COPY_SLAB, slab, slot), *blocks])
    stream.position = position
    return stream


def whole(driver: Driver, ids: Ids, most: int) -> F32:
    return run(driver.begin(0), ids, [most] * (len(ids) // most))


def chunked(driver: Driver, ids: Ids, most: int) -> Pair:
    plan = [min(n, most) for n in (37, 1, 64, 5, 66, 1, 1, 17)]
    other = run(driver.begin(1), ids, [*plan, *[most // 2] * len(ids)])
    return Pair(whole(driver, ids, most), other)


def batch(driver: Driver, ids: Ids, most: int) -> Pair:
    """Rows of half a wave, and single ones, beside as much of two other sequences."""
    plan = [most // 2] * ((len(ids) - 10) // (most // 2)) + [1] * 10
    plain = run(driver.begin(0), ids, plan)
    piece = max(1, (most - most // 2) // 2)
    slots = [driver.begin(slot).slot for slot in (2, 3)]
    beside = [Row(RowKind.PREFILL, slot, slot, 0, piece, ids[-piece:]) for slot in slots]
    return Pair(plain, run(driver.begin(1), ids, plan, beside))


def adopted_prompt(driver: Driver, ids: Ids, most: int) -> Pair:
    """From a cut inside of a row, at no multiple of anything."""
    cut = len(ids) // 2 + 3
    first = driver.begin(1)
    plan = [most] * (cut // most)
    run(first, ids[: sum(plan)], plan)
    offset = cut - first.position
    rest = ids[first.position : min(first.position + most, len(ids))]
    if offset:
        driver.wave([first.row(RowKind.PREFILL, rest, cuts=((offset, CUT_SLAB),))])
    adopter = copied(driver, 2, first, CUT_SLAB if offset else first.slab, cut)
    other = run(adopter, ids[cut:], [most] * len(ids))
    return Pair(whole(driver, ids, most)[cut:], other)


def adopted_generation(driver: Driver, ids: Ids, most: int) -> Pair:
    """From behind decoded tokens."""
    begin, end = len(ids) // 3, len(ids) // 3 + 21
    first = driver.begin(1)
    run(first, ids[:begin], [most] * (begin // most))
    run(first, ids[begin:end], [1] * (end - begin))
    other = run(copied(driver, 2, first, first.slab, end), ids[end:], [most] * len(ids))
    return Pair(whole(driver, ids, most)[end:], other)


def speculation(driver: Driver, ids: Ids, most: int) -> Pair:
    """All slots decode; then all of them in VERIFY rows, whose ids are forced, so that both ways
    go on alike: right drafts, wrong ones, and both."""
    streams = min(driver.info.slots, most // (1 + DRAFTS))
    prompt = 30
    plain: list[list[F32]] = [[] for _ in range(streams)]
    other: list[list[F32]] = [[] for _ in range(streams)]

    def begun() -> list[Stream]:
        found = [driver.begin(slot) for slot in range(streams)]
        for stream in found:
            run(stream, ids[stream.slot : stream.slot + prompt], [30])
        return found

    def wave(running: list[Stream], rows: list[Row], out: list[list[F32]]) -> None:
        result = driver.wave(rows, taps=["logits"])
        logits, at = result.taps["logits"].reshape(-1, driver.spec.vocab), 0
        for stream, row, done in zip(running, rows, result.rows, strict=True):
            n = done.position - stream.position
            out[stream.slot].append(logits[at : at + n].copy())
            stream.position, at = done.position, at + row.n

    def known(stream: Stream, n: int) -> Ids:
        return ids[stream.slot + stream.position :][:n]

    total = 0
    running = begun()
    for stream in running:
        future = ids[stream.slot + prompt + 1 :]
        driver.wave(before=[StateOp(OpKind.FORCE, stream.slot, data=future)])
    for right, wrong in ((DRAFTS, 0), (3, 6), (0, 4), (9, DRAFTS - 9), (DRAFTS, 0)):
        rows = []
        for stream in running:
            drafts = known(stream, 1 + right + wrong)[1:].copy()
            drafts[right:] = (drafts[right:] + 1) % driver.spec.token_limit
            first = known(stream, 1) if stream.position == prompt else [-1]
            tokens = [int(token) for token in (*first, *drafts)]
            rows.append(stream.row(RowKind.VERIFY, tokens, draft=Draft.GIVEN))
        wave(running, rows, other)
        total += right + 1
    assert all(stream.position == prompt + total for stream in running)
    running = begun()
    for _ in range(total):
        wave(running, [stream.row(RowKind.PREFILL, known(stream, 1)) for stream in running], plain)
    return Pair(*(np.concatenate([x for parts in way for x in parts]) for way in (plain, other)))


Experiment = Callable[[Driver, Ids, int], Pair]
EXPERIMENTS: dict[str, Experiment] = {
    "chunked": chunked,
    "batch": batch,
    "adopted_prompt": adopted_prompt,
    "adopted_generation": adopted_generation,
    "speculation": speculation,
}
NUMBERS = {
    "chunked": lib.KSL_CHUNKED,
    "batch": lib.KSL_BATCH,
    "adopted_prompt": lib.KSL_ADOPTED_PROMPT,
    "adopted_generation": lib.KSL_ADOPTED_GENERATION,
    "speculation": lib.KSL_SPECULATION,
}


def everything(driver: Driver, ids: Ids, most: int) -> dict[str, Pair]:
    """Every property, in waves of at most `most` columns."""
    return {name: experiment(driver, ids, most) for name, experiment in EXPERIMENTS.items()}


def stated(driver: Driver) -> dict[str, tuple[float, float]]:
    """What an engine says of the properties: distance and divergence."""
    said = driver.info.equality
    return {name: (said[at].distance, said[at].divergence) for name, at in NUMBERS.items()}
