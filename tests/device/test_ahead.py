"""Waves that are submitted before the one in front has ended: they are planned while the device
commits what that one's rows accepted, and leave the bits of waves that wait for each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kslserve.engine.types import Draft, OpKind, Row, RowKind, StateOp
from tests.device.conftest import Opener
from tests.device.shapes import spec_named, tensors_of
from tests.native.driver import Driver, Stream, WaveResult

pytestmark = pytest.mark.cuda

BLOCK, PER_SLOT, SLOTS = 16, 16, 3
WIDTHS = (2, 3, 8, 16)


def verify(rng: np.random.Generator, stream: Stream) -> tuple[Row, StateOp]:
    """A row of drafts, and the ids that are taken instead of sampled ones: they accept any part of
    it. Moves the position to where that ends."""
    n = int(rng.choice(WIDTHS))
    ids = rng.integers(0, 199, n + 1).astype(np.int32)
    row = stream.row(RowKind.VERIFY, ids[:n], draft=Draft.GIVEN)
    accepted = int(rng.integers(n))
    taken = ids[1 : accepted + 2].copy()
    taken[accepted] = 198 - taken[accepted] if taken[accepted] != 99 else 0
    stream.position += accepted + 1
    return row, StateOp(OpKind.FORCE, stream.slot, data=taken)


def play(driver: Driver, *, ahead: bool) -> tuple[list[WaveResult], list[bytes]]:
    """What waves said and left in slabs and blocks. ahead: two at a time."""
    rng = np.random.default_rng(11)
    streams = [driver.begin(slot, first_block=slot * PER_SLOT) for slot in range(SLOTS)]
    results: list[WaveResult] = []
    waiting: list[Callable[[], WaveResult]] = []
    for _ in range(60):
        rows, force = [], []
        for stream in streams:
            if stream.position > BLOCK * PER_SLOT - 2 * max(WIDTHS):
                continue
            if rng.random() < 0.6:
                row, op = verify(rng, stream)
                rows.append(row)
                force.append(op)
            elif rng.random() < 0.5:
                rows.append(stream.row(RowKind.LAST, rng.integers(0, 199, 1)))
                stream.position += 1
        waiting.append(driver.submit(rows, before=force))
        if len(waiting) == (2 if ahead else 1):
            results.append(waiting.pop(0)())
    results += [wait() for wait in waiting]
    images = [driver.slab_image(slot).tobytes() for slot in range(SLOTS)]
    images += [driver.block_image(block).tobytes() for block in range(SLOTS * PER_SLOT)]
    return results, images


@pytest.mark.parametrize(
    ("shape", "weights", "kv"),
    [("27b-heads", "nvfp4", "q4"), ("round", "e2m3", "fp8"), ("sliced", "bf16", "bf16")],
)
def test_waves_ahead(opened: Opener, shape: str, weights: str, kv: str) -> None:
    spec = spec_named(shape)
    sizes = {
        "slots": SLOTS, "slabs": SLOTS, "blocks": SLOTS * PER_SLOT, "block_tokens": BLOCK,
        "blocks_per_slot": PER_SLOT, "wave_columns": 64, "activations": "auto", "kv": kv,
    }  # fmt: skip
    tensors = tensors_of(spec, weights)
    (said, left), (said_ahead, left_ahead) = (
        play(opened(spec, tensors, **sizes), ahead=ahead) for ahead in (False, True)
    )
    assert sum(row.accepted for wave in said for row in wave.rows) > 100
    assert said == said_ahead
    assert left == left_ahead
