"""Positions far into a context, up to 128k, and every place of a cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kslserve.engine.model import ModelSpec
from kslserve.engine.types import OpKind, Row, RowKind, StateOp, TableEdit
from tests.device.conftest import Opener
from tests.device.limits import F32, LAYERS_TOLERANCE, LONG_TOLERANCE, distance
from tests.device.shapes import SEED, spec_named, tensors_of
from tests.device.test_rows import images
from tests.native.driver import U8, Driver, Stream

pytestmark = pytest.mark.cuda

PREGATE = "layers.0.attn_pregate"
BLOCK = 128


def attention(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """One layer, of attention."""
    return replace(
        spec_named("27b-heads"),
        hidden=128,
        intermediate=128,
        layer_kinds=("full",),
        mtp_layers=0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dims=head_dim // 4,
    )


def made(driver: Driver, seed: int) -> list[U8]:
    """Blocks of keys and values of random ids."""
    stream = driver.begin(0)
    ids = np.random.default_rng(seed).integers(0, driver.spec.token_limit, 4 * BLOCK)
    stream.prefill(ids.astype(np.int32), [BLOCK] * 4)
    return [driver.block_image(block) for block in stream.blocks[:4]]


def fill(driver: Driver, images: list[U8], seed: int, blocks: int) -> Stream:
    """A sequence whose first blocks are these, in any order."""
    stream = driver.begin(0)
    order = np.random.default_rng(seed).integers(0, len(images), blocks)
    for at in range(0, blocks, 64):
        driver.wave(
            before=[
                StateOp(OpKind.LOAD_BLOCK, stream.blocks[i], data=images[order[i]])
                for i in range(at, min(at + 64, blocks))
            ]
        )
    return stream


@pytest.mark.parametrize("depth", [4095, 32768, 131009])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "q4", "f32"])
def test_behind_many_keys(opened: Opener, kv: str, depth: int) -> None:
    """A token, a few and a prompt's piece, at a ragged place: those few against the reference,
    which holds the same blocks, and the piece against rows too short for tiles."""
    spec = attention(6, 1, 256)
    tensors = tensors_of(spec, "f32", SEED)
    blocks = -(-(depth + 100) // BLOCK)
    sizes = {"slots": 1, "slabs": 1, "blocks": blocks, "blocks_per_slot": blocks}
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, 100).astype(np.int32)
    found: list[F32] = []
    images: list[U8] = []
    for on in ("cuda", "cpu"):
        driver = opened(spec, tensors, on=on, kv=kv, block_tokens=BLOCK, **sizes)
        # Made once: codes of values that differ in their last bits may differ by one.
        images = images or made(driver, SEED)
        fill(driver, images, SEED, blocks)
        short = []
        for at, n in ((0, 1), (1, 2), (3, 5)):
            row = Row(RowKind.PREFILL, 0, 0, depth + at, n, ids[at : at + n])
            short.append(driver.wave([row], taps=[PREGATE]).taps[PREGATE].copy())
        found.append(np.concatenate(short))
        if on == "cuda":
            for at in range(8, 100, 23):
                row = Row(RowKind.PREFILL, 0, 0, depth + at, 23, ids[at : at + 23])
                short.append(driver.wave([row], taps=[PREGATE]).taps[PREGATE].copy())
            row = Row(RowKind.PREFILL, 0, 0, depth, 100, ids)
            piece = driver.wave([row], taps=[PREGATE]).taps[PREGATE]
            assert distance(piece, np.concatenate(short)) <= LONG_TOLERANCE, f"seed {SEED}"
    print(kv, depth, "off by", distance(found[0], found[1]))
    assert distance(found[0], found[1]) <= 2e-4, f"seed {SEED}"


@pytest.mark.parametrize("kv", ["bf16", "q4"])
def test_many_streams_past_the_room_of_one_launch(opened: Opener, kv: str) -> None:
    """More columns behind more keys than scratch takes at one time: what each gives alone, to the
    bit. All share the blocks before their own last one."""
    spec = attention(2, 1, 64)
    tensors = tensors_of(spec, "f32")
    depth, streams = 131200, 35
    shared = depth // BLOCK
    sizes = {"slots": streams, "slabs": streams, "blocks": shared + streams + 1}
    driver = opened(
        spec, tensors, kv=kv, block_tokens=BLOCK, blocks_per_slot=shared + 1, wave_columns=160,
        **sizes,
    )  # fmt: skip
    first = fill(driver, made(driver, 3), 3, shared)
    for slot in range(1, streams):
        ids = [*first.blocks[:shared], shared + slot]
        driver.wave(edits=[TableEdit(slot, 0, ids)], before=[StateOp(OpKind.ZERO_SLAB, slot)])
    rows = [Row(RowKind.PREFILL, s, s, depth + s % 7, 1, [11 + s]) for s in range(streams)]
    together = driver.wave(rows, taps=[PREGATE]).taps[PREGATE].copy()
    for slot in range(0, streams, 2):
        alone = driver.wave([rows[slot]], taps=[PREGATE]).taps[PREGATE]
        np.testing.assert_array_equal(alone[0], together[slot], f"stream {slot}")


def test_engine_of_one_column(opened: Opener) -> None:
    """Shapes of waves are rounded up, but never past what the engine has room for."""
    spec = spec_named("round")
    tensors = tensors_of(spec, "nvfp4")
    sizes = {"slots": 1, "slabs": 1, "blocks": 2, "blocks_per_slot": 2, "wave_columns": 1}
    small = opened(spec, tensors, kv="q4", **sizes).begin(0)
    large = opened(spec, tensors, kv="q4", wave_columns=60).begin(0)
    assert [small.last([5]), *small.decode(30)] == [large.last([5]), *large.decode(30)]


@pytest.mark.parametrize("kv", ["bf16", "q4"])
@pytest.mark.parametrize("columns", [63, 130])
def test_a_cut_at_every_position(opened: Opener, kv: str, columns: int) -> None:
    """The state that a row leaves at each of its positions: for short rows that of a row which ends
    there, to the bit; for long ones that of the reference, token by token."""
    spec = replace(
        spec_named("27b-heads"),
        layer_kinds=("linear", "full", "linear"),
        heads=6,
        kv_heads=1,
        lin_key_heads=2,
        lin_value_heads=6,
    )
    tensors = tensors_of(spec, "bf16", SEED)
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, columns).astype(np.int32)
    driver = opened(spec, tensors, kv=kv)
    long = columns >= 64
    reference = (opened(spec, tensors, on="cpu", kv=kv) if long else driver).begin(5)
    cuts: list[bytes] = []
    for at in range(1, columns + 1, 4):
        row = driver.begin(0).row(
            RowKind.PREFILL,
            ids,
            cuts=tuple((at + i, 6 + i) for i in range(min(4, columns + 1 - at))),
        )
        driver.wave([row])
        cuts += [driver.slab_image(slab).tobytes() for _, slab in row.cuts]
    assert len(cuts) == columns
    for at, cut in enumerate(cuts):
        reference.prefill(ids[at : at + 1])
        state = reference.driver.slab_image(5)
        if not long:
            assert cut == state.tobytes(), f"seed {SEED} cut {at + 1}"
            continue
        far = distance(np.frombuffer(cut, "<f4"), state.view("<f4"))
        assert far <= LAYERS_TOLERANCE, f"seed {SEED} cut {at + 1}"
    if not long:
        whole = driver.begin(1)
        whole.prefill(ids)
        assert images(whole) == images(reference)
