"""MTP keys and values that are made some waves later, together: the bits of those that are made in
every wave, whatever comes between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.engine.types import Draft, OpKind, Row, RowKind, StateOp
from tests.device.conftest import Opener
from tests.device.shapes import spec_named, tensors_of
from tests.native.driver import GREEDY, Driver, RowResult, Stream

pytestmark = pytest.mark.cuda

BLOCK, PER_SLOT = 16, 8
SLOTS = 34  # two of them are free for heirs
HOT = SamplingParams(temperature=1.0, presence_penalty=0.5)
# An operation behind a wave's rows has their keys made in it.
AT_ONCE = [StateOp(OpKind.COPY_SLAB, SLOTS, SLOTS + 1)]


@dataclass
class Played:
    """A driver that plays what another one does. at_once: nothing waits in it."""

    driver: Driver
    at_once: bool
    streams: dict[int, Stream] = field(default_factory=dict)

    def begin(self, slot: int, first_block: int) -> None:
        sampling = HOT if slot % 2 else GREEDY
        self.streams[slot] = self.driver.begin(slot, sampling=sampling, first_block=first_block)

    def wave(self, rows: list[Row]) -> list[RowResult]:
        done = self.driver.wave(rows, after=AT_ONCE if self.at_once else ()).rows
        for row, result in zip(rows, done, strict=True):
            self.streams[row.slot].position = result.position
        return done

    def adopt(self, slot: int, heir: int, first_block: int) -> None:
        """The heir goes on where a sequence is, which ends: in its full blocks, and a copy of the
        last one."""
        old = self.streams.pop(slot)
        self.begin(heir, first_block)
        new = self.streams[heir]
        full = old.position // BLOCK
        new.share(old.blocks[:full])
        copies = [StateOp(OpKind.COPY_SLAB, old.slab, new.slab)]
        if full < PER_SLOT:
            copies.append(StateOp(OpKind.COPY_BLOCK, old.blocks[full], new.blocks[full]))
        self.driver.wave(before=copies)
        new.position = old.position

    def memory(self) -> list[bytes]:
        d = self.driver
        blocks = [d.block_image(block).tobytes() for block in range(SLOTS * PER_SLOT)]
        return blocks + [d.slab_image(slab).tobytes() for slab in range(SLOTS)]


def rows_of(rng: np.random.Generator, played: Played, kind: str, ids: list[int]) -> list[Row]:
    """Rows of the running sequences, most of which decode."""
    rows = []
    for slot, stream in played.streams.items():
        missing = kind == "fewer" and rng.random() < 0.3
        token = [ids[slot]] if stream.position == 0 or ids[slot] >= 0 else [-1]
        if missing:
            continue
        if kind == "verify" and rng.random() < 0.5 and len(played.streams) < 20:
            drafts = rng.integers(0, 199, 1 + rng.integers(2)).tolist()
            rows.append(stream.row(RowKind.VERIFY, [*token, *drafts], draft=Draft.GIVEN))
            continue
        propose = 2 if kind == "propose" and rng.random() < 0.5 else 0
        cuts = ((1, SLOTS + 1),) if kind == "cut" and not rows else ()
        rows.append(stream.row(RowKind.LAST, token, propose=propose, cuts=cuts))
    return rows


KINDS = ("plain", "fewer", "verify", "propose", "cut", "begin", "end", "adopt")


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 16, 32])
@pytest.mark.parametrize(
    ("shape", "weights", "kv"),
    [("27b-heads", "nvfp4", "q4"), ("round", "e2m3", "fp8"), ("sliced", "bf16", "bf16")],
)
def test_keys_that_wait(opened: Opener, shape: str, weights: str, kv: str, streams: int) -> None:
    rng = np.random.default_rng(streams)
    spec = spec_named(shape)
    sizes = {
        "slots": SLOTS, "slabs": SLOTS + 2, "blocks": SLOTS * PER_SLOT,
        "block_tokens": BLOCK, "blocks_per_slot": PER_SLOT, "wave_columns": 64,
        "activations": "auto", "kv": kv,
    }  # fmt: skip
    tensors = tensors_of(spec, weights)
    both = [Played(opened(spec, tensors, **sizes), at_once) for at_once in (False, True)]
    waiting, free = both[0], list(range(SLOTS))
    ids = [-1] * SLOTS
    for _ in range(90):
        kind = str(rng.choice(KINDS, p=(0.79, *[0.03] * 7)))
        for slot, stream in list(waiting.streams.items()):
            if stream.position > (PER_SLOT - 1) * BLOCK or (kind == "end" and rng.random() < 0.5):
                for played in both:
                    del played.streams[slot]
                free.append(slot)
        if kind == "adopt" and waiting.streams and free:
            slot, heir = int(rng.choice(list(waiting.streams))), free.pop(0)
            for played in both:
                played.adopt(slot, heir, heir * PER_SLOT)
            ids[heir] = 11
        while len(waiting.streams) < streams and free:
            slot = free.pop(0)
            for played in both:
                played.begin(slot, slot * PER_SLOT)
            ids[slot] = int(rng.integers(199))
            if kind == "begin":
                prompt = rng.integers(0, 199, 20).astype(np.int32)
                done = [p.wave([p.streams[slot].row(RowKind.LAST, prompt)]) for p in both]
                assert done[0] == done[1]
                ids[slot] = -1
        state = rng.bit_generator.state
        found = []
        for played in both:
            rng.bit_generator.state = state
            found.append(played.wave(rows_of(rng, played, kind, ids)))
        assert found[0] == found[1]
        for slot in waiting.streams:
            if waiting.streams[slot].position:
                ids[slot] = -1
    assert waiting.memory() == both[1].memory()
