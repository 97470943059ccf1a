"""KV formats and slabs against the published bytes of the 27B."""

from __future__ import annotations

import dataclasses

import pytest

from kslserve.engine import budget
from kslserve.engine.model import ModelSpec

SPEC = ModelSpec(
    vocab=248320, hidden=5120, intermediate=17408,
    layer_kinds=("linear", "linear", "linear", "full") * 16, heads=24, kv_heads=4, head_dim=256,
    rotary_dims=64, lin_key_heads=16, lin_value_heads=48, lin_key_dim=128, lin_value_dim=128,
    conv_taps=4, mtp_layers=0, token_limit=248077, rope_theta=1e7, norm_eps=1e-6,
    max_positions=262144,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "size"),
    [
        ("f32", 131_072), ("bf16", 65_536), ("fp8", 33_280), ("q4", 26_880),
        ("int8_g64", 33_792), ("int4_g32", 18_432), ("int8ring_int4", 18_432),
    ],
)  # fmt: skip
def test_bytes_of_a_token(kv: str, size: int) -> None:
    assert budget.kv_token_bytes(SPEC, kv) == size
    assert budget.block_bytes(SPEC, kv, 128) == 128 * size
    with_mtp = dataclasses.replace(SPEC, mtp_layers=1)
    assert budget.kv_token_bytes(with_mtp, kv) == size // 16 * 17
    assert budget.kv_problem(SPEC, kv) is None


def test_every_format_is_known() -> None:
    for kv in budget.KV_FORMATS:
        assert budget.kv_head_bytes(256, kv) > 0
    with pytest.raises(ValueError, match="no KV format"):
        budget.kv_head_bytes(256, "f16")


def test_slabs() -> None:
    assert budget.slab_bytes(SPEC) == 156_893_184 + 20_480
    ring = budget.slab_bytes(SPEC, "int8ring_int4") - budget.slab_bytes(SPEC)
    assert ring == 1024 * 33_792 == 34_603_008


@pytest.mark.parametrize(
    ("kv", "dim", "fits"),
    [
        ("q4", 32, True), ("q4", 96, False), ("q4", 512, False), ("int8_g64", 96, False),
        ("int8_g64", 192, True), ("int4_g32", 96, True), ("int4_g32", 80, False),
        ("int8ring_int4", 96, False), ("fp8", 24, True), ("bf16", 24, True),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit(kv: str, dim: int, fits: bool) -> None:
    problem = budget.kv_problem(dataclasses.replace(SPEC, head_dim=dim), kv)
    assert (problem is None) == fits
    assert problem is None or (str(dim) in problem and problem.endswith("."))
