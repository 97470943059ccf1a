"""Waves of many tokens, whose packed products read activations as single halves: every tap against
the CPU's scalar reference, at ragged numbers of tokens, and a token's products alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kslserve.engine.model import TensorArg
from kslserve.engine.types import Ids, RowKind
from tests.device.conftest import Opener
from tests.device.limits import (
    F32,
    LAYERS_TOLERANCE,
    check_taps,
    distance,
    rounded_limits,
)
from tests.device.shapes import SEED, arrays_of, spec_named, tap_names, tensors_of
from tests.device.test_parity import e4m3
from tests.device.test_rows import images
from tests.native.driver import Driver
from tests.tiny import tiny_values

pytestmark = pytest.mark.cuda

PLAIN = 1e-4  # of float32 products, in another order
Taps = dict[str, F32]


def taps_of(driver: Driver, ids: Ids, cut: int) -> Taps:
    """All taps of a prompt in two waves, the second with another sequence."""
    stream, other = driver.begin(0), driver.begin(1)
    taps: Taps = {}
    for index, (part, beside) in enumerate(((ids[:cut], 0), (ids[cut:], 23))):
        rows = [stream.row(RowKind.PREFILL, part)]
        if beside:
            rows.append(other.row(RowKind.PREFILL, ids[:beside]))
        result = driver.wave(rows, taps=tap_names(driver.spec))
        stream.position = result.rows[0].position
        taps |= {f"{index}.{name}": tap.copy() for name, tap in result.taps.items()}
    return taps


@pytest.mark.parametrize("policy", ["bf16", "bf16 as halves", "e2m3", "nvfp4", "mixed"])
@pytest.mark.parametrize("shape", ["tiny", "round", "27b-heads"])
def test_every_tap(opened: Opener, shape: str, policy: str) -> None:
    policy, _, halves = policy.partition(" as ")
    spec = spec_named(shape)
    tensors = tensors_of(spec, policy, SEED)
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, spec.token_limit, 240).astype(np.int32)
    cut = int(rng.integers(65, 220))

    def run(tensors: list[TensorArg], on: str = "cpu", activations: str = "float") -> Taps:
        driver = opened(spec, tensors, on=on, wave_columns=240, activations=activations)
        return taps_of(driver, ids, cut)

    found = run(tensors, "cuda", "auto" if halves else "float")
    expected = run(tensors)
    if policy == "bf16" and not halves:
        limits = dict.fromkeys(expected, PLAIN)
    else:
        limits = rounded_limits(shape, tensors, expected, run)
    check_taps(found, expected, limits, f"{shape} {policy}, seed {SEED}, cut {cut}")


@pytest.mark.parametrize("policy", ["e2m3", "nvfp4", "bf16"])
def test_products_depend_on_their_token_alone(opened: Opener, policy: str) -> None:
    spec = spec_named("round")
    tensors = tensors_of(spec, policy)
    driver = opened(spec, tensors, wave_columns=240, activations="auto")
    ids = np.random.default_rng(4).integers(0, spec.token_limit, 240).astype(np.int32)
    names = ["layers.0.gdn_qkv", "layers.0.gdn_z"]
    whole = driver.begin(0)
    taps = whole.run(whole.row(RowKind.PREFILL, ids), names).taps
    expected = {name: tap.copy() for name, tap in taps.items()}
    for slot, cut in enumerate((66, 129, 170), 1):
        split = driver.begin(slot)
        for part in (slice(0, cut), slice(cut, 240)):
            taps = split.run(split.row(RowKind.PREFILL, ids[part]), names).taps
            for name in names:
                np.testing.assert_array_equal(taps[name], expected[name][part], f"{name} {cut}")


@pytest.mark.parametrize("policy", ["e2m3", "nvfp4", "bf16"])
def test_tiles_of_every_width(opened: Opener, policy: str) -> None:
    """Matrices with more rows than the device takes at one time: blocks take 256, 160 or 128 tokens
    by the size of the wave, and a product has the same bits."""
    kinds = ("linear",)
    spec = replace(
        spec_named("round"), hidden=256, intermediate=16896, layer_kinds=kinds, mtp_layers=0
    )
    tensors = tensors_of(spec, policy)
    driver = opened(spec, tensors, wave_columns=256, activations="auto")
    ids = np.random.default_rng(8).integers(0, spec.token_limit, 256).astype(np.int32)
    names = ["layers.0.gdn_qkv", "layers.0.mlp_out"]
    expected: dict[str, F32] = {}
    for slot, sizes in enumerate(([256], [129, 127], [66, 100, 90])):
        stream = driver.begin(slot)
        parts = []
        for n in sizes:
            at = stream.position
            parts.append(stream.run(stream.row(RowKind.PREFILL, ids[at : at + n]), names).taps)
        found = {name: np.concatenate([part[name] for part in parts]) for name in names}
        expected = expected or found
        for name in names:
            # The mixer before it depends on the pieces of a prompt; its first one does not.
            n = sizes[0]
            np.testing.assert_array_equal(found[name][:n], expected[name][:n], f"{name} {sizes}")
            assert distance(found[name], expected[name]) <= LAYERS_TOLERANCE


@pytest.mark.parametrize("policy", ["e2m3", "nvfp4", "mixed", "bf16"])
def test_waves_without_taps(opened: Opener, policy: str) -> None:
    """Where nobody watches, what only taps read is not written, and products are added to the
    residual by their own kernels: the same bits."""
    spec = spec_named("27b-heads")
    tensors = tensors_of(spec, policy)
    driver = opened(spec, tensors, kv="q4", wave_columns=240, activations="auto")
    ids = np.random.default_rng(6).integers(0, spec.token_limit, 240).astype(np.int32)
    watched, plain = driver.begin(0), driver.begin(1)
    for part in (ids[:131], ids[131:]):
        watched.run(watched.row(RowKind.PREFILL, part), tap_names(spec))
        plain.prefill(part)
    assert images(watched) == images(plain)


def test_fp6_products_of_e4m3_activations(opened: Opener) -> None:
    """They are those of the rounded activations, but for sums of 128 products in the matrix units;
    activations are rounded to e4m3 with the largest power of two a token that saturates nothing:
    norms at once, others from halves."""
    spec = spec_named("27b-heads")
    values = tiny_values(spec, arrays_of(spec, SEED), "e2m3")
    driver = opened(spec, tensors_of(spec, "e2m3", SEED), wave_columns=256, activations="auto")
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, 201).astype(np.int32)
    stream = driver.begin(0)
    names = ["in_norm", "gdn_qkv", "gdn_z", "post_norm", "mlp_gate", "mlp_up", "mlp_act", "mlp_out"]
    result = stream.run(stream.row(RowKind.PREFILL, ids), [f"layers.0.{name}" for name in names])
    taps = {name: result.taps[f"layers.0.{name}"].reshape(len(ids), -1) for name in names}

    def product(x: F32, matrix: str) -> F32:
        rounded, _ = e4m3(x)
        weights = values[f"model.layers.0.{matrix}.weight"].astype(np.float64)
        return (rounded.astype(np.float64) @ weights.T).astype(np.float32)

    for x, matrix, out in (
        ("in_norm", "linear_attn.in_proj_qkv", "gdn_qkv"),
        ("in_norm", "linear_attn.in_proj_z", "gdn_z"),
        ("post_norm", "mlp.gate_proj", "mlp_gate"),
        ("post_norm", "mlp.up_proj", "mlp_up"),
    ):
        assert distance(taps[out], product(taps[x], matrix)) <= 3e-4, f"seed {SEED}: {out}"
    act = taps["mlp_gate"] / (1 + np.exp(-taps["mlp_gate"])) * taps["mlp_up"]
    assert distance(taps["mlp_act"], act.astype(np.float32)) <= 1e-5
    # The act was a half of 2^-4 of it first.
    half = (taps["mlp_act"] / 16).astype(np.float16).astype(np.float32) * 16
    assert distance(taps["mlp_out"], product(half, "mlp.down_proj")) <= 5e-4, f"seed {SEED}"
