"""What an engine takes of the machine's memory, and what it gives back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kslserve.engine.types import OpKind, StateOp
from tests.native.driver import Driver, Refused, Stream
from tests.resident import resident
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, SLABS = 16, 300  # about 50 and 20 MB
KEPT_BLOCK, KEPT_SLAB = 3, 7
IDS = np.random.default_rng(3).integers(0, 199, 60, dtype=np.int32)


@pytest.fixture
def roomy() -> Iterator[Driver]:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "f32")
    sizes = {"blocks": BLOCKS, "slabs": SLABS, "block_tokens": 4096, "blocks_per_slot": 2}
    with Driver(spec, tensors, slots=2, **sizes) as driver:
        yield driver


def drop_all_but_one(driver: Driver) -> None:
    ops = []
    for kind, kept, count in (
        (OpKind.DROP_SLABS, KEPT_SLAB, SLABS),
        (OpKind.DROP_BLOCKS, KEPT_BLOCK, BLOCKS),
    ):
        ops += [StateOp(kind, 0, kept), StateOp(kind, kept + 1, count - kept - 1)]
    driver.wave(before=ops)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by /proc")
def test_dropped_memory_goes_back_to_the_system(roomy: Driver) -> None:
    rng = np.random.default_rng(1)
    block = rng.integers(1, 255, roomy.info.block_bytes).astype(np.uint8)
    slab = rng.integers(1, 255, roomy.info.slab_bytes).astype(np.uint8)
    saved = np.zeros_like(block), np.zeros_like(slab)
    before = resident()
    roomy.wave(before=[StateOp(OpKind.LOAD_BLOCK, i, data=block) for i in range(BLOCKS)])
    assert resident() - before > 0.9 * BLOCKS * block.nbytes, "pages come with the first use"
    roomy.wave(before=[StateOp(OpKind.LOAD_SLAB, i, data=slab) for i in range(SLABS)])
    full = resident()
    pools = BLOCKS * block.nbytes + SLABS * slab.nbytes
    drop_all_but_one(roomy)
    assert full - resident() > 0.85 * pools
    # What was kept is whole, its neighbours can be used again.
    for number, image in ((KEPT_BLOCK, block), (KEPT_BLOCK + 1, block[::-1].copy())):
        if number != KEPT_BLOCK:
            roomy.wave(before=[StateOp(OpKind.LOAD_BLOCK, number, data=image)])
        roomy.wave(before=[StateOp(OpKind.SAVE_BLOCK, number, data=saved[0])])
        assert np.array_equal(saved[0], image)
    roomy.wave(before=[StateOp(OpKind.SAVE_SLAB, KEPT_SLAB, data=saved[1])])
    assert np.array_equal(saved[1], slab)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by /proc")
def test_touched_memory_has_its_pages(roomy: Driver) -> None:
    def touch() -> int:
        before = resident()
        roomy.wave(
            before=[StateOp(OpKind.TOUCH_BLOCKS, 4, 12), StateOp(OpKind.TOUCH_SLABS, 8, 292)]
        )
        return resident() - before

    pages = 12 * roomy.info.block_bytes  # so few slabs may have pages from the start
    assert touch() > 0.9 * pages
    assert touch() < 0.01 * pages
    block = np.full(roomy.info.block_bytes, 3, np.uint8)
    slab = np.full(roomy.info.slab_bytes, 5, np.uint8)
    before = resident()
    roomy.wave(before=[StateOp(OpKind.LOAD_BLOCK, i, data=block) for i in range(4, 16)])
    roomy.wave(before=[StateOp(OpKind.LOAD_SLAB, i, data=slab) for i in range(8, 300)])
    assert resident() - before < 0.01 * pages
    # Nothing else was written.
    saved = np.zeros_like(block)
    for number in (3, 4):
        roomy.wave(before=[StateOp(OpKind.LOAD_BLOCK, number, data=block)])
    roomy.wave(before=[StateOp(OpKind.TOUCH_BLOCKS, 4, 1)])
    roomy.wave(before=[StateOp(OpKind.SAVE_BLOCK, 3, data=saved)])
    assert np.array_equal(saved, block)


def test_dropped_memory_computes_the_same_again(roomy: Driver) -> None:
    def answer() -> list[int]:
        stream = roomy.begin(0)
        return [stream.last(IDS), *stream.decode(6)]

    first = answer()
    drop_all_but_one(roomy)
    assert answer() == first


def test_slabs_that_changed_places_are_dropped_like_others(roomy: Driver) -> None:
    def begin() -> tuple[Stream, int]:
        stream = roomy.begin(0)
        return stream, stream.last(IDS)

    stream, first = begin()
    others = stream.decode(6)
    stream, _ = begin()
    assert stream.verify(first, others[:4]).accepted == 4  # so it lies where spare ones do
    rng = np.random.default_rng(2)
    slabs = rng.integers(1, 255, (3, roomy.info.slab_bytes)).astype(np.uint8)
    for number, image in enumerate(slabs, start=1):
        roomy.wave(before=[StateOp(OpKind.LOAD_SLAB, number, data=image)])
    roomy.wave(before=[StateOp(OpKind.DROP_SLABS, 0, 2)])
    roomy.wave(before=[StateOp(OpKind.DROP_SLABS, 3, 1)])
    saved = np.zeros_like(slabs[1])
    roomy.wave(before=[StateOp(OpKind.SAVE_SLAB, 2, data=saved)])
    assert np.array_equal(saved, slabs[1])
    stream, again = begin()
    assert [again, *stream.decode(6)] == [first, *others]


def test_images_come_and_go_in_parts(roomy: Driver) -> None:
    rng = np.random.default_rng(2)
    for save, load, size in (
        (OpKind.SAVE_SLAB, OpKind.LOAD_SLAB, roomy.info.slab_bytes),
        (OpKind.SAVE_BLOCK, OpKind.LOAD_BLOCK, roomy.info.block_bytes),
    ):
        image, back = rng.integers(0, 255, size).astype(np.uint8), np.zeros(size, np.uint8)
        borders = [0, 5, 64, size // 2 + 1, size]
        spans = list(itertools.pairwise(borders))
        roomy.wave(after=[StateOp(load, 4, a, image[a:b]) for a, b in spans])
        roomy.wave(before=[StateOp(save, 4, a, back[a:b]) for a, b in reversed(spans)])
        assert np.array_equal(back, image)
        for offset, data in ((size, image[:1]), (1, image), (0, image[:0])):
            with pytest.raises(Refused):
                roomy.wave(before=[StateOp(load, 4, offset, data)])


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told by /proc")
def test_the_peak_is_what_was_planned() -> None:
    """The server's sizes of a context, computed to its end, with every slab and block in use; in a
    process of its own, whose peak can be reset."""
    command = [sys.executable, "-m", "bench.memory", "--one", "ksl-nano", "--context", "8192"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=120)
    found = json.loads(done.stdout)
    planned = sum(found["parts"].values())
    assert planned == pytest.approx(found["told"], rel=0.02)
    assert found["peak"] == pytest.approx(planned, rel=0.1)
    fixed = found["parts"]["weights"] + found["parts"]["activations"]
    assert found["idle"] < 1.5 * fixed, "pools went back"
