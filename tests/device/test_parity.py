"""Every tap of the CUDA backend against the CPU's scalar reference, on fresh random inputs: every
weight encoding, and each KV format against its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kslserve.engine.codecs import ENC_E2M3, ENC_NVFP4
from kslserve.engine.model import FILL_CONSTANT, FILL_UNIFORM, Fill, ModelSpec, TensorArg
from kslserve.engine.types import RowKind
from tests.device.conftest import Opener
from tests.device.limits import (
    EXACT,
    F32,
    FIRST_PRODUCT,
    LAYERS_TOLERANCE,
    LONG_TOLERANCE,
    check_taps,
    distance,
    rounded_limits,
)
from tests.device.shapes import SEED, arrays_of, spec_named, tap_names, tensors_of
from tests.native.driver import Driver
from tests.tiny import POLICIES, tiny_tensors

pytestmark = pytest.mark.cuda

FIRST_PRODUCTS = ("0.layers.0.gdn_qkv", "0.layers.0.gdn_z")


def taps_of(driver: Driver, spec: ModelSpec, ids: npt.NDArray[np.int32]) -> dict[str, F32]:
    """All taps of a prompt chunk, of a second chunk, and of a wave of two decode rows beside a
    chunk of another sequence."""
    names = tap_names(spec)
    found: dict[str, F32] = {}
    first, other = driver.begin(0), driver.begin(1)
    waves = []
    for part in (ids[:41], ids[41:47], ids[47:48]):
        waves.append(first.run(first.row(RowKind.PREFILL, part), names).taps)
    rows = [first.row(RowKind.PREFILL, ids[48:49]), other.row(RowKind.PREFILL, ids[:19])]
    waves.append(driver.wave(rows, taps=names).taps)
    for index, taps in enumerate(waves):
        found |= {f"{index}.{name}": tap.copy() for name, tap in taps.items()}
    found["slab"] = driver.slab_image(0).view("<f4").copy()
    return found


@pytest.mark.parametrize("policy", [*POLICIES, "bf16 as halves"])
@pytest.mark.parametrize("shape", ["tiny", "round", "27b-heads"])
def test_every_tap(opened: Opener, shape: str, policy: str) -> None:
    policy, _, halves = policy.partition(" as ")
    spec = spec_named(shape)
    tensors = tensors_of(spec, policy, SEED, bool(halves))
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, 64).astype(np.int32)
    activations = "auto" if halves else "float"
    found = taps_of(opened(spec, tensors, activations=activations), spec, ids)
    expected = taps_of(opened(spec, tensors, on="cpu"), spec, ids)
    if halves or policy in ("e2m3", "nvfp4", "mixed"):
        limits = rounded_limits(
            shape,
            tensors,
            expected,
            lambda moved: taps_of(opened(spec, moved, on="cpu"), spec, ids),
        )
        limits |= dict.fromkeys(FIRST_PRODUCTS, FIRST_PRODUCT)
    else:
        limits = dict.fromkeys(expected, EXACT)
    check_taps(found, expected, limits, f"{shape} {policy}, seed {SEED}")


@pytest.mark.parametrize("encoding", [0, 1, 2, 3, 4])
def test_tensors_made_on_the_device(opened: Opener, encoding: int) -> None:
    spec = spec_named("round")
    tensors = []
    for tensor in tensors_of(spec, "f32", 3):
        vector = tensor.cols == 1 or tensor.name.endswith("conv1d.weight")
        fill = Fill(FILL_CONSTANT, scale=0.25) if vector else Fill(FILL_UNIFORM, 5, 0.06)
        own = 0 if vector or "embed" in tensor.name else encoding
        tensors.append(TensorArg(tensor.name, own, tensor.rows, tensor.cols, fill=fill))
    ids = np.arange(9, dtype=np.int32)
    logits = []
    for on in ("cuda", "cpu"):
        stream = opened(spec, tensors, on=on).begin(0)
        result = stream.run(stream.row(RowKind.PREFILL, ids), ["logits"])
        logits.append(result.taps["logits"].copy())
    limit = LAYERS_TOLERANCE if encoding in (ENC_E2M3, ENC_NVFP4) else EXACT
    assert distance(logits[0], logits[1]) <= limit


def rotated(values: F32) -> F32:
    """Natural-order Walsh-Hadamard of the last axis, as ksl's q4 rotates keys and queries."""
    d = values.shape[-1]
    out = values.astype(np.float32)
    stride = 1
    while stride < d:
        pairs = out.reshape(*out.shape[:-1], d // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2).reshape(out.shape)
        stride *= 2
    return out * np.float32(1 / np.sqrt(d))


def e4m3(values: F32) -> tuple[F32, F32]:
    """Decoded values and scales [..., 1] of rows stored as e4m3 with a power-of-two scale."""
    most = np.abs(values).max(axis=-1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(most / 448))
    scale = np.where(most == 0, 1.0, 2.0**exponent).astype(np.float32)
    x = np.abs(values / scale).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(x, 2.0**-9))), -6) - 3)
    decoded = np.minimum(np.rint(x / step) * step, 448.0) * np.sign(values) * scale
    return decoded.astype(np.float32), scale


def q4(values: F32) -> F32:
    """Keys as q4 stores them, rotated."""
    k = rotated(values).reshape(*values.shape[:-1], -1, 32)
    low, high = k.min(axis=-1, keepdims=True), k.max(axis=-1, keepdims=True)
    floor = np.maximum(np.abs(low), np.abs(high)) / np.float32(2033)
    half = np.maximum((high - low) / np.float32(15), floor).astype(np.float16)
    scale = half.astype(np.float32)
    constant = (low == high) | (scale == 0)
    safe = np.where(constant, np.float32(1), scale)
    zero = np.clip(np.rint(-low / safe), -2033, 2048)
    codes = np.clip(np.rint(k / safe + zero), 0, 15)
    stored = np.where(constant, high.astype(np.float16).astype(np.float32), (codes - zero) * scale)
    return stored.reshape(values.shape).astype(np.float32)


def read_blocks(
    spec: ModelSpec, kv: str, images: list[npt.NDArray[np.uint8]], tokens: int
) -> tuple[F32, F32]:
    """Keys and values [kv layers, positions, kv heads, d] of block images."""
    d, heads, layers = (
        spec.head_dim,
        spec.kv_heads,
        spec.layer_kinds.count("full") + spec.mtp_layers,
    )
    sizes = (d, 4, d, 4) if kv == "fp8" else (d // 2, d // 8, d, 4)
    keys, values = [], []
    for image in images:
        planes, at = [], 0
        per_layer = image.reshape(layers, -1)
        for size in sizes:
            width = tokens * heads * size
            planes.append(per_layer[:, at : at + width].reshape(layers, tokens, heads, size))
            at += width
        table = np.array([decode_e4m3(code) for code in range(256)], dtype=np.float32)
        scale = np.ascontiguousarray(planes[3]).view("<f4")
        values.append(table[planes[2]] * scale)
        if kv == "fp8":
            keys.append(table[planes[0]] * np.ascontiguousarray(planes[1]).view("<f4"))
        else:
            codes = np.stack([planes[0] & 15, planes[0] >> 4], axis=-1).reshape(
                layers, tokens, heads, d // 32, 32
            )
            pairs = np.ascontiguousarray(planes[1]).view("<f2").astype(np.float32)
            pairs = pairs.reshape(layers, tokens, heads, d // 32, 2)
            keys.append(
                ((codes - pairs[..., 1:]) * pairs[..., :1]).reshape(layers, tokens, heads, d)
            )
    return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)


def decode_e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 512 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


@pytest.mark.parametrize("kv", ["fp8", "q4"])
@pytest.mark.parametrize(
    ("shape", "width", "portable"),
    [
        ("round", 150, False),
        ("round", 60, False),
        ("27b-heads", 150, False),
        ("27b-heads", 150, True),
        ("27b-heads", 60, False),
    ],
)
def test_packed_kv(opened: Opener, shape: str, kv: str, width: int, portable: bool) -> None:
    """Stored rows are bit-exact; attention over them is that of the decoded rows, in one long row
    and in short ones."""
    spec = spec_named(shape)
    arrays = dict(arrays_of(spec, SEED))
    # A channel far off and, through zero weights, one-signed and constant groups.
    for leaf, where, value in (
        ("k_norm", spec.head_dim // 4 * 3, 40.0),
        ("v_proj", slice(spec.head_dim), 0.0),
    ):
        name = f"model.layers.1.self_attn.{leaf}.weight"
        arrays[name] = arrays[name].copy()
        arrays[name][where] = value
    tensors = tiny_tensors(spec, arrays, "bf16")
    driver = opened(spec, tensors, kv=kv, wave_columns=300, portable=portable)
    n = 150
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, n).astype(np.int32)
    stream = driver.begin(0)
    names = [f"layers.1.attn_{leaf}" for leaf in ("q", "k", "v", "pregate")]
    parts: dict[str, list[F32]] = {name: [] for name in names}
    for at in range(0, n, width):
        taps = stream.run(stream.row(RowKind.PREFILL, ids[at : at + width]), names).taps
        for name in names:
            parts[name].append(taps[name].copy())
    q, k, v, pregate = (np.concatenate(parts[name]).reshape(n, -1, spec.head_dim) for name in names)
    images = [driver.block_image(block) for block in stream.blocks[: -(-n // 16)]]
    keys, values = read_blocks(spec, kv, images, 16)
    keys, values = keys[0, :n], values[0, :n]
    expected_k = q4(k) if kv == "q4" else e4m3(k)[0]
    np.testing.assert_array_equal(keys, expected_k, f"seed {SEED}")
    np.testing.assert_array_equal(values, e4m3(v)[0], f"seed {SEED}")
    if kv == "q4":
        q = rotated(q)
    group = spec.heads // spec.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(keys, group, axis=1), dtype=np.float64)
    scores /= np.sqrt(spec.head_dim)
    scores[:, np.triu(np.ones((n, n), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("hqk,khd->qhd", weights, np.repeat(values, group, axis=1))
    limit = LONG_TOLERANCE if width >= 64 and shape == "27b-heads" else 1e-5
    assert distance(pregate, expected.astype(np.float32)) <= limit


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "q4"])
def test_long_rows_are_short_ones(opened: Opener, kv: str, portable: bool) -> None:
    """Prompt rows of 64 columns and more, cut anywhere and two in a wave beside a decode row,
    against rows that go token by token; by the device's own kernels and by those of others."""
    spec = spec_named("27b-heads")
    tensors = tensors_of(spec, "bf16", SEED)
    driver = opened(
        spec, tensors, kv=kv, wave_columns=600, blocks=200, blocks_per_slot=24, portable=portable
    )
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, spec.token_limit, 330).astype(np.int32)
    names = ["layers.0.gdn_core", "layers.0.gdn_normed", "layers.1.attn_pregate", "logits"]
    long, other, short = driver.begin(0), driver.begin(1), driver.begin(2)
    short.prefill(ids[:7])
    rows = [
        long.row(RowKind.PREFILL, ids[:299], cuts=((1, 6), (30, 7), (194, 8), (299, 9))),
        short.row(RowKind.PREFILL, ids[7:8]),
        other.row(RowKind.PREFILL, ids[100:200]),
    ]
    first = {name: tap.copy() for name, tap in driver.wave(rows, taps=names).taps.items()}
    long.position, short.position = 299, 8
    rest = long.run(long.row(RowKind.PREFILL, ids[299:]), names).taps
    rest = {name: tap.copy() for name, tap in rest.items()}
    found, slabs = {name: [first[name][299:300]] for name in names}, {}
    for at, end in ((8, 30), (30, 60), (60, 120), (120, 180), (180, 194), (194, 240), (240, 299)):
        row = short.row(RowKind.PREFILL, ids[at:end])
        for name, tap in short.run(row, names).taps.items():
            found[name].append(tap.copy())
        slabs[end] = driver.slab_image(2).view("<f4").copy()
    for name in names:
        expected = np.concatenate(found[name])
        limit = LONG_TOLERANCE if name.startswith("layers.0") else LAYERS_TOLERANCE
        assert distance(first[name][7:299], expected) <= limit, f"seed {SEED} {name}"
    for end, slab in ((30, 7), (194, 8), (299, 9)):
        image = driver.slab_image(slab).view("<f4")
        assert distance(image, slabs[end]) <= LAYERS_TOLERANCE, f"seed {SEED} cut {end}"
    for name, tap in short.run(short.row(RowKind.PREFILL, ids[299:]), names).taps.items():
        assert distance(rest[name], tap) <= LAYERS_TOLERANCE, f"seed {SEED} {name}"
    image = driver.slab_image(0).view("<f4")
    assert distance(image, driver.slab_image(2).view("<f4")) <= LAYERS_TOLERANCE, f"seed {SEED}"


@pytest.mark.parametrize(
    ("head_dim", "portable"), [(256, False), (256, True), (128, True), (64, True)]
)
@pytest.mark.parametrize("kv", ["bf16", "fp8", "q4"])
def test_few_columns_behind_many_keys(
    opened: Opener, kv: str, head_dim: int, portable: bool
) -> None:
    """Prompt rows whose tiles are too few for a device, so that their keys are divided: alone, and
    beside one with less behind it, against rows too short for tiles."""
    spec = replace(spec_named("27b-heads"), layer_kinds=("full",), mtp_layers=0, head_dim=head_dim)
    tensors = tensors_of(spec, "f32", SEED)
    driver = opened(
        spec, tensors, kv=kv, wave_columns=700, blocks=700, blocks_per_slot=170, portable=portable
    )
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, 2700).astype(np.int32)
    name = "layers.0.attn_pregate"
    streams = [driver.begin(slot) for slot in range(4)]
    for stream, n in zip(streams, (2500, 300, 2500, 300), strict=True):
        stream.prefill(ids[:n], [700, 700, 700][: n // 700])
    rows = [s.row(RowKind.PREFILL, ids[s.position :][:100]) for s in streams[:2]]
    both = driver.wave(rows, taps=[name]).taps[name].copy()
    alone = streams[2].run(streams[2].row(RowKind.PREFILL, ids[2500:2564]), [name]).taps[name]
    assert distance(alone, both[:64]) <= LONG_TOLERANCE, f"seed {SEED}"
    for stream, found in ((streams[2], both[64:100]), (streams[3], both[100:])):
        parts = [
            stream.run(stream.row(RowKind.PREFILL, ids[stream.position :][:n]), [name])
            .taps[name]
            .copy()
            for n in ((36,) if stream is streams[2] else (60, 40))
        ]
        assert distance(found, np.concatenate(parts)) <= LONG_TOLERANCE, f"seed {SEED}"


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_long_contexts(opened: Opener, kv: str) -> None:
    """More keys than a span of chunks, prompt and decode, against the reference."""
    spec = spec_named("tiny")
    tensors = tensors_of(spec, "f32", SEED)
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, 2501).astype(np.int32)
    sizes = {"slots": 1, "slabs": 1, "blocks": 160, "blocks_per_slot": 160, "wave_columns": 700}
    found = []
    for on in ("cuda", "cpu"):
        stream = opened(spec, tensors, on=on, kv=kv, **sizes).begin(0)
        stream.prefill(ids[:2500], [700, 700, 700])
        taps = stream.run(
            stream.row(RowKind.PREFILL, ids[2500:]), ["layers.1.attn_pregate", "logits"]
        ).taps
        found.append({name: tap.copy() for name, tap in taps.items()})
    for name in found[0]:
        assert distance(found[0][name], found[1][name]) <= 2e-4, f"seed {SEED} {name}"
