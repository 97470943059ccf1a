"""The KV formats: rows as the engine stores them, bit for bit those of the numpy reference."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kslserve.core.sampling import SamplingParams
from kslserve.engine import kvrows
from kslserve.engine.budget import KV_FORMATS, kv_row_bytes, kv_token_bytes, ring_bytes
from kslserve.engine.model import ModelSpec
from kslserve.engine.types import OpKind, RowKind, StateOp
from kslserve.errors import EngineError
from tests import kv_reference as reference
from tests.closeness import relative
from tests.native.driver import Driver, Refused
from tests.resident import resident
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, wide_spec

F32 = npt.NDArray[np.float32]

COMPACT = ("fp8", "q4", "int8_g64", "int4_g32")
each_format = pytest.mark.parametrize("kv", KV_FORMATS)
# Every size of heads that q4 takes, where the format takes it.
each_head = pytest.mark.parametrize(
    ("kv", "d"),
    [(kv, d) for kv in KV_FORMATS for d in (32, 64, 128, 256) if d > 32 or "int8" not in kv],
)
each_side = pytest.mark.parametrize("side", [reference.KEY, reference.VALUE], ids=["k", "v"])


def compare(kv: str, side: int, x: F32) -> F32:
    """Encode by both, expect equal bytes and equal values; the values."""
    codes, scales = kvrows.kv_encode(kv, side, x)
    expected_codes, expected_scales = reference.encode(kv, side, x)
    assert scales.tobytes() == expected_scales.tobytes()
    assert codes.tobytes() == expected_codes.tobytes()
    values = kvrows.kv_decode(kv, side, codes, scales, x.shape[1])
    expected = reference.decode(kv, side, expected_codes, expected_scales, x.shape[1])
    assert values.tobytes() == expected.tobytes()
    return values


def unrotated(kv: str, side: int, values: F32) -> F32:
    return reference.rotate(values) if kv == "q4" and side == reference.KEY else values


@each_head
@each_side
def test_normal_rows(kv: str, side: int, d: int) -> None:
    x = np.random.default_rng(d).standard_normal((300, d)).astype(np.float32) * np.float32(3)
    error = relative(unrotated(kv, side, compare(kv, side, x)), x)
    most = {
        "f32": 0, "bf16": 0.002, "fp8": 0.03, "q4": 0.03 if side else 0.085,
        "int8_g64": 0.012, "int4_g32": 0.115, "int8ring_int4": 0.115,
    }[kv]  # fmt: skip
    assert error <= most


@each_format
@each_side
def test_rows_that_are_not_normal(kv: str, side: int) -> None:
    """One-signed, narrow and constant groups, outliers, zeros, tiny and huge values."""
    d = 128
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((1, d)).astype(np.float32)
    spike = normal.copy()
    spike[0, 64] = 60
    ramp = np.linspace(-1, 1, d, dtype=np.float32)[None]
    rows = [
        normal, np.abs(normal), -np.abs(normal), normal * 1e-3 + 50, normal * 1e-6 - 50, spike,
        -spike, np.zeros((1, d)), np.ones((1, d)), np.full((1, d), -3.25), np.eye(1, d, 64) * 60,
        np.eye(1, d, 0), normal * 1e-30, normal * 1e-38, normal * 1e-7, normal * 1e4, ramp,
        ramp * 448, ramp * 7, ramp * 127, np.repeat(normal[:, ::32], 32, axis=1),
    ]  # fmt: skip
    compare(kv, side, np.concatenate(rows).astype(np.float32))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_an_outlier_costs_q4_little(d: int) -> None:
    """A large constant in one channel makes whole groups one-signed after the rotation: the zero
    point may leave 0..15, or they would be lost."""
    rng = np.random.default_rng(d)
    x = rng.standard_normal((200, d)).astype(np.float32)
    x[:, 64 % d] = 60
    values = reference.rotate(compare("q4", reference.KEY, x))
    assert relative(values, x) < 0.03
    constant = np.full((1, d), 2.5, np.float32)
    assert relative(reference.rotate(compare("q4", reference.KEY, constant)), constant) < 1e-3


def test_the_rotation_is_hadamards() -> None:
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    exact = x.astype(np.float64) @ reference.hadamard(64) / 8
    assert np.abs(reference.rotate(x) - exact).max() < 1e-6
    assert np.abs(reference.rotate(reference.rotate(x)) - x).max() < 1e-6


@pytest.mark.parametrize(("kv", "levels"), [("int8_g64", 127), ("int4_g32", 7)])
def test_ties_go_to_the_even_code(kv: str, levels: int) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [levels, 0.5, 1.5, 2.5, -0.5, -1.5]
    x[0, 32] = levels
    values = compare(kv, reference.KEY, x)
    assert values[0, :6].tolist() == [levels, 0, 2, 2, 0, -2]


def test_ties_of_e4m3() -> None:
    """Between 16 and 17 tenths of steps: 17 lies half way from 16 to 18, 19 from 18 to 20."""
    x = np.zeros((1, 64), np.float32)
    x[0, :5] = [256, 17, 19, -17, 448]
    assert compare("fp8", reference.KEY, x)[0, :5].tolist() == [256, 16, 20, -16, 448]


@each_format
@each_side
@settings(max_examples=60, deadline=None)
@given(
    x=arrays.arrays(
        np.float32, (2, 64), elements=st.floats(-4000, 4000, width=32, allow_subnormal=True)
    )
)
def test_any_rows(kv: str, side: int, x: F32) -> None:
    """Rotated they stay within what a half can hold; keys come from a norm."""
    compare(kv, side, x)


@pytest.mark.parametrize(
    ("kv", "d"), [("q4", 96), ("q4", 24), ("int8_g64", 96), ("int4_g32", 24), ("int8ring_int4", 32)]
)
def test_other_heads_are_refused(kv: str, d: int) -> None:
    x = np.ones((1, d), np.float32)
    with pytest.raises(EngineError, match=rf"KV format {kv} takes heads of .* not {d}"):
        kvrows.kv_encode(kv, reference.KEY, x)


def test_an_engine_refuses_heads_that_a_format_does_not_take() -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    with pytest.raises(Refused, match="q4 takes heads of 32, 64, 128 or 256 dimensions, not 24"):
        Driver(spec, tensors, kv="q4")


def spec_of(d: int) -> ModelSpec:
    return replace(wide_spec(), head_dim=d)


@each_head
def test_the_pool_holds_the_rows_of_keys_and_values(kv: str, d: int, isa: str) -> None:
    """Prompt chunks, decode steps and the MTP layer: block images are the encoded taps."""
    spec = spec_of(d)
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    with Driver(spec, tensors, kv=kv, isa=isa) as driver:
        stream = driver.begin(0, sampling=SamplingParams(temperature=0))
        keys, values = [], []
        taps = ["layers.1.attn_k", "layers.1.attn_v"]
        for n in (21, 1, 10):
            ids = np.arange(stream.position, stream.position + n, dtype=np.int32)
            wave = driver.wave([stream.row(RowKind.PREFILL, ids)], taps=taps)
            stream.position = wave.rows[0].position
            keys.append(wave.taps[taps[0]].reshape(n, spec.kv_heads, spec.head_dim))
            values.append(wave.taps[taps[1]].reshape(n, spec.kv_heads, spec.head_dim))
        size = driver.info.block_bytes
        assert size == kv_token_bytes(spec, kv) * driver.block_tokens
        images = [np.empty(size, np.uint8) for _ in range(2)]
        blocks = stream.blocks[:2]
        driver.wave(
            after=[
                StateOp(OpKind.SAVE_BLOCK, block, data=image)
                for block, image in zip(blocks, images, strict=True)
            ]
        )
        rows = driver.block_tokens * spec.kv_heads
        at = 0
        for side, tapped in ((reference.KEY, keys), (reference.VALUE, values)):
            x = np.concatenate(tapped).reshape(-1, spec.head_dim)
            for plane, width in zip(
                reference.encode(kv, side, x), kv_row_bytes(spec.head_dim, kv, side), strict=True
            ):
                found = b"".join(image[at : at + rows * width].tobytes() for image in images)
                assert found == plane[: 2 * rows].tobytes()
                at += rows * width


def stored(kv: str, side: int, x: F32) -> F32:
    """What a format keeps of rows [n, heads, d], without its rotation."""
    rows = x.reshape(-1, x.shape[2])
    kept = reference.decode(kv, side, *reference.encode(kv, side, rows), x.shape[2])
    return unrotated(kv, side, kept).reshape(x.shape)


def attention(q: F32, keys: F32, values: F32) -> F32:
    """Causal attention [n, heads, d] in float64. keys and values [n, n, kv_heads, d]: as each
    position reads them."""
    n, heads, d = q.shape
    group = heads // keys.shape[2]
    result = np.zeros(q.shape)
    for h in range(heads):
        scores = np.einsum("pd,pjd->pj", q[:, h].astype(np.float64), keys[:, :, h // group])
        scores = np.where(np.tri(n, dtype=bool), scores / np.sqrt(d), -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        result[:, h] = np.einsum("pj,pjd->pd", p, values[:, :, h // group])
    return result


@each_head
def test_keys_and_values_are_read_as_they_are_stored(kv: str, d: int, isa: str) -> None:
    """By prompt rows and decode steps, over blocks in no order, past a tile of keys; what was not
    rounded is another result."""
    spec = spec_of(d)
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.random.default_rng(2).integers(0, 199, 90).astype(np.int32)
    names = [f"layers.1.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_pregate")]
    taps: list[list[F32]] = [[] for _ in names]
    with Driver(spec, tensors, kv=kv, kv_ring=128, isa=isa) as driver:
        stream = driver.begin(0)
        for n in (70, 1, 16, 1, 2):
            row = stream.row(RowKind.PREFILL, ids[stream.position : stream.position + n])
            result = stream.run(row, names)
            for found, name in zip(taps, names, strict=True):
                found.append(result.taps[name].reshape(n, -1, spec.head_dim))
    q, k, v, out = (np.concatenate(found) for found in taps)
    form = "int8_g64" if kv == "int8ring_int4" else kv  # the ring reaches over all of them
    as_stored, as_given = (
        attention(q, *(np.broadcast_to(x, (len(q), *x.shape)) for x in sides))
        for sides in ((stored(form, reference.KEY, k), stored(form, reference.VALUE, v)), (k, v))
    )
    assert np.abs(out - as_stored).max() < 1e-4
    assert kv == "f32" or np.abs(out - as_given).max() > 3e-4


@pytest.mark.parametrize("kv", ["bf16", "fp8", "q4", "int8_g64", "int4_g32", "int8ring_int4"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads", [2, 6])  # for 2 of keys and values
def test_rows_read_as_codes(kv: str, d: int, heads: int) -> None:
    """Where queries, probabilities and values are rounded to bytes: near what is stored, the same
    bits for a prompt row and for one column at a time, with keys that differ much in size."""
    spec = replace(spec_of(d), heads=heads)
    arrays = tiny_arrays(spec)
    arrays["model.layers.1.self_attn.k_norm.weight"][d // 4 * 3] = 6.0  # a channel far off
    arrays["model.layers.1.self_attn.v_proj.weight"][:d:3] *= 20.0
    tensors = tiny_tensors(spec, arrays, "bf16")
    ids = np.random.default_rng(d).integers(0, 199, 150).astype(np.int32)
    names = [f"layers.1.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_pregate")]
    with Driver(spec, tensors, kv=kv, kv_ring=RING, activations="auto") as driver:
        results = []
        for slot, plan in enumerate(([150], [1] * 20 + [44, 1, 2] + [1] * 83)):
            stream = driver.begin(slot)
            taps: list[list[F32]] = [[] for _ in names]
            for n in plan:
                row = stream.row(RowKind.PREFILL, ids[stream.position : stream.position + n])
                found = stream.run(row, names).taps
                for parts, name in zip(taps, names, strict=True):
                    parts.append(found[name].reshape(n, -1, d))
            results.append([np.concatenate(parts) for parts in taps])
    q, k, v, out = results[0]
    assert out.tobytes() == results[1][3].tobytes()
    if kv == "int8ring_int4":
        expected = read_by_position(q, k, v)["ring"]
    else:
        sides = (stored(kv, reference.KEY, k), stored(kv, reference.VALUE, v))
        expected = attention(q, *(np.broadcast_to(x, (len(q), *x.shape)) for x in sides))
    limit = 0.06 if kv == "fp8" else 0.04  # e4m3 uses little more than half of the bytes
    assert np.linalg.norm(out - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("side", [reference.KEY, reference.VALUE])
@pytest.mark.parametrize("d", [32, 64, 256])
def test_a_nan_among_fp8_rows_reaches_who_sees_it(d: int, side: int) -> None:
    spec = spec_of(d)
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.random.default_rng(d).integers(0, 199, 30).astype(np.int32)
    tap = "layers.1.attn_pregate"
    with Driver(spec, tensors, kv="fp8", activations="auto") as driver:
        stream = driver.begin(0)
        stream.prefill(ids)
        block = stream.blocks[20 // driver.block_tokens]
        image = driver.block_image(block)
        rows = driver.block_tokens * spec.kv_heads
        plane = side * rows * sum(kv_row_bytes(d, "fp8", reference.KEY))
        image[plane + (20 % driver.block_tokens * spec.kv_heads + 1) * d + d - 1] = 0x7F
        driver.wave(before=[StateOp(OpKind.LOAD_BLOCK, block, data=image)])
        for n in (1, 7):
            stream.position = 30
            found = stream.run(stream.row(RowKind.PREFILL, ids[:n]), [tap]).taps[tap]
            seen = np.isnan(found.reshape(n, 2, -1))
            assert not seen[:, 0].any()
            assert seen[:, 1].all()


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("heads", [2, 4, 6, 8, 12])  # for 2 of keys and values
def test_few_queries_and_many_read_q4_alike(d: int, heads: int) -> None:
    """A prompt row, and one column at a time: the same bits. A NaN among the values reaches the
    query that sees it, whole, and no earlier one."""
    spec = replace(spec_of(d), heads=heads)
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.random.default_rng(d).integers(0, 199, 75).astype(np.int32)
    tap = "layers.1.attn_pregate"
    with Driver(spec, tensors, kv="q4", activations="auto") as driver:
        results = []
        for slot, plan in enumerate(([75], [1] * 75)):
            stream, parts = driver.begin(slot), []
            for n in plan:
                row = stream.row(RowKind.PREFILL, ids[stream.position : stream.position + n])
                parts.append(stream.run(row, [tap]).taps[tap].reshape(n, heads, d))
            results.append((np.concatenate(parts), stream.images()))
        assert results[0][0].tobytes() == results[1][0].tobytes()
        assert results[0][1] == results[1][1]
        block = stream.blocks[74 // driver.block_tokens]
        image = driver.block_image(block)
        value = sum(kv_row_bytes(d, "q4", reference.KEY)) * driver.block_tokens * spec.kv_heads
        width = kv_row_bytes(d, "q4", reference.VALUE)[0]
        row_of_74 = value + 74 % driver.block_tokens * spec.kv_heads * width
        image[row_of_74 + width - 1] = 0xFF  # of the first KV head
        driver.wave(before=[StateOp(OpKind.LOAD_BLOCK, block, data=image)])
        for n in (1, 2, 8):
            stream.position = 74
            found = stream.run(stream.row(RowKind.PREFILL, ids[:n]), [tap]).taps[tap]
            assert np.isfinite(found).all()  # the row wrote position 74 anew
            driver.wave(before=[StateOp(OpKind.LOAD_BLOCK, block, data=image)])
            stream.position = 75
            found = stream.run(stream.row(RowKind.PREFILL, ids[:n]), [tap]).taps[tap]
            seen = np.isnan(found.reshape(n, 2, -1))
            assert seen[:, 0].all()
            assert not seen[:, 1].any()


RING = 64


def ring_planes(image: npt.NDArray[np.uint8], spec: ModelSpec) -> list[bytes]:
    """The planes of the first trunk layer's ring in a slab image."""
    at, planes = len(image) - ring_bytes(spec, "int8ring_int4", RING), []
    for side in (reference.KEY, reference.VALUE):
        for width in kv_row_bytes(spec.head_dim, "int8_g64", side):
            size = RING * spec.kv_heads * width
            planes.append(image[at : at + size].tobytes())
            at += size
    return planes


def ring_reference(x: F32, side: int) -> list[bytes]:
    """Planes of a ring over positions x [n, kv_heads, head_dim]."""
    planes = []
    for plane in reference.encode("int8_g64", side, x.reshape(-1, x.shape[2])):
        rows = plane.reshape(len(x), -1)
        ring = np.zeros((RING, rows.shape[1]), rows.dtype)
        for position, row in enumerate(rows):
            ring[position % RING] = row
        planes.append(ring.tobytes())
    return planes


def read_by_position(q: F32, keys: F32, values: F32) -> dict[str, F32]:
    """Attention [n, heads, head_dim] in float64: a query reads the last RING positions in int8 and
    those before in int4; and, as controls, all in int8 or all in int4."""
    recent, old = (
        [stored(kv, side, x) for side, x in ((reference.KEY, keys), (reference.VALUE, values))]
        for kv in ("int8_g64", "int4_g32")
    )
    n = len(q)
    age = (np.arange(n)[:, None] - np.arange(n)[None])[..., None, None]
    return {
        name: attention(q, *(np.where(near, a, b) for a, b in zip(recent, old, strict=True)))
        for name, near in (("ring", age < RING), ("int8", age < n), ("int4", age < -n))
    }


@pytest.mark.parametrize("plan", [[150], [70, 1, 16, 17, 1, 45], [1] * 20 + [130]])
def test_a_ring_is_read_by_position(isa: str, plan: list[int]) -> None:
    """Whatever the rows: the slab ends with the last positions in int8, and a query reads a key in
    int8 when it is one of its own last positions."""
    spec = wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.random.default_rng(2).integers(0, 199, 150).astype(np.int32)
    names = [f"layers.1.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_pregate")]
    taps: list[list[F32]] = [[] for _ in names]
    with Driver(spec, tensors, kv="int8ring_int4", kv_ring=RING, isa=isa) as driver:
        stream = driver.begin(0)
        for n in plan:
            row = stream.row(RowKind.PREFILL, ids[stream.position : stream.position + n])
            result = stream.run(row, names)
            for found, name in zip(taps, names, strict=True):
                found.append(result.taps[name].reshape(n, -1, spec.head_dim))
        image = driver.slab_image(stream.slab)
    q, k, v, out = (np.concatenate(found) for found in taps)
    assert ring_planes(image, spec) == [
        *ring_reference(k, reference.KEY), *ring_reference(v, reference.VALUE)
    ]  # fmt: skip
    expected = read_by_position(q, k, v)
    assert np.abs(out - expected["ring"]).max() < 1e-4
    for control in ("int8", "int4"):
        assert np.abs(out - expected[control]).max() > 1e-3


def test_rejected_drafts_leave_no_trace_in_a_ring(isa: str) -> None:
    """And a cut inside a row has the ring of its own position."""
    spec = wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.random.default_rng(2).integers(0, 199, 150).astype(np.int32)
    with Driver(spec, tensors, kv="int8ring_int4", kv_ring=RING, isa=isa) as driver:
        plain, drafted = driver.begin(0), driver.begin(1)
        plain.prefill(ids[:90])
        drafted.run(drafted.row(RowKind.PREFILL, ids[:120], cuts=((3, 8), (90, 9))))
        assert np.array_equal(driver.slab_image(9), driver.slab_image(0))
        short = driver.begin(2)
        short.prefill(ids[:3])
        assert np.array_equal(driver.slab_image(8), driver.slab_image(2))
        first = plain.last(ids[90:120])
        drafted = driver.begin(1)
        drafted.prefill(ids[:119])
        again = drafted.last(ids[119:120])
        assert again == first
        second = plain.decode(1)[0]
        wrong = [(second + 1) % 199, 5, 6]
        row = drafted.verify(first, wrong)
        assert (row.accepted, row.tokens) == (0, [second])
        assert np.array_equal(driver.slab_image(0), driver.slab_image(1))


def test_a_ring_is_whole_tiles() -> None:
    spec = wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    for tokens in (0, 32, 100):
        with pytest.raises(Refused, match=f"kv_ring is {tokens}, must be a multiple of 64"):
            Driver(spec, tensors, kv="int8ring_int4", kv_ring=tokens)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_a_pool_takes_memory_as_its_blocks_are_used() -> None:
    spec = wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    before = resident()
    with Driver(spec, tensors, kv="f32", blocks=8192, block_tokens=64) as driver:
        pool = driver.info.block_bytes * driver.info.blocks
        assert pool >= 512 << 20
        assert resident() - before < pool // 8
        driver.begin(0).prefill(np.arange(100, dtype=np.int32))
        assert resident() - before < pool // 8
