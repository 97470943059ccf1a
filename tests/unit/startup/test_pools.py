"""Pool sizes from settings, shape and memory."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.config import Settings
from kslserve.engine.budget import slab_bytes, slot_bytes
from kslserve.engine.model import ModelSpec
from kslserve.errors import UsageError
from kslserve.setting import AUTO
from kslserve.startup.pools import (
    free_memory_bytes,
    host_tier_bytes,
    kv_token_bytes,
    margin_bytes,
    plan_pools,
    size,
    workspace_bytes,
)

SPEC = ModelSpec(
    vocab=8192, hidden=256, intermediate=896, layer_kinds=("linear", "full"), heads=4, kv_heads=2,
    head_dim=128, rotary_dims=32, lin_key_heads=2, lin_value_heads=4, lin_key_dim=128,
    lin_value_dim=128, conv_taps=4, mtp_layers=1, token_limit=8192, rope_theta=1e7, norm_eps=1e-6,
    max_positions=32768,
)  # fmt: skip
TOKEN = 2 * 2 * 2 * 128 * 2  # layers (one is the MTP layer), K and V, heads, dim, bf16
PLENTY = 1 << 40
# One linear layer: 4 heads of 128 x 128, 3 columns of 2 * 2 * 128 + 4 * 128, and the hidden.
SLAB = 4 * (4 * 128 * 128 + 3 * 1024 + 256)


def test_bytes_of_a_token() -> None:
    assert kv_token_bytes(SPEC, "bf16") == TOKEN
    assert kv_token_bytes(SPEC, "f32") == 2 * TOKEN


def test_with_memory_every_sequence_gets_a_whole_context() -> None:
    plan = plan_pools(Settings(), SPEC, PLENTY)
    assert plan.context == 32768
    assert plan.sizes.blocks == 8 * 256
    assert plan.sizes.blocks_per_slot == 256
    assert (plan.sizes.slots, plan.sizes.slabs) == (8, 8 + 64)
    assert plan.sizes.wave_columns == 512 + 8
    assert plan.notes == ()


def beside(kv: int) -> int:
    """Free memory that leaves `kv` bytes for KV: half is margin, and eight sequences and two
    checkpoints take their part."""
    workspace = workspace_bytes(Settings(threads=2), SPEC, 8)
    return 2 * (10 * SLAB + 8 * slot_bytes(SPEC, 0) + workspace + kv)


def test_with_less_memory_fewer_contexts() -> None:
    """Half of what there is may hold more than one context."""
    block = TOKEN * 128 + 8 * 8
    settings = Settings(threads=2, prefix_cache_slabs=2)
    plan = plan_pools(settings, SPEC, beside(2 * 3 * 256 * block))
    assert plan.context == 32768
    assert plan.sizes.blocks == 3 * 256
    plan = plan_pools(settings, SPEC, beside(1 * 256 * block))
    assert (plan.context, plan.sizes.blocks) == (32768, 256)


def test_with_little_memory_a_shorter_context() -> None:
    block = TOKEN * 128 + 8 * 8
    plan = plan_pools(Settings(threads=2), SPEC, beside(7 * block))
    assert plan.context == 7 * 128
    assert plan.sizes.blocks == 7
    assert plan.sizes.slabs == 8 + 2, "checkpoints give way"
    assert len(plan.notes) == 1
    with pytest.raises(UsageError, match=r"8 sequences take .*--max-seqs.*--wave-columns"):
        plan_pools(Settings(threads=2), SPEC, beside(block - 1) // 2)


@pytest.mark.parametrize(
    ("device", "free", "margin"),
    [
        ("cpu", 1 << 30, 1 << 29), ("cpu", 8 << 30, 2 << 30), ("cpu", 100 << 30, 15 << 30),
        ("cuda", 1 << 30, 1 << 29), ("cuda", 8 << 30, 1 << 29), ("cuda", 100 << 30, 5 << 30),
    ],
)  # fmt: skip
def test_automatic_sizes_leave_a_margin(device: str, free: int, margin: int) -> None:
    """With a model that could fill any memory."""
    settings = Settings(device=device, threads=2, max_seqs=4, wave_columns=16)
    greedy = dataclasses.replace(SPEC, max_positions=1 << 27, kv_heads=4)
    plan = plan_pools(settings, greedy, free)
    assert margin_bytes(settings, free) == plan.margin == margin
    sizes = plan.sizes
    taken = sizes.blocks * sizes.block_tokens * 2 * TOKEN + sizes.slabs * slab_bytes(greedy)
    taken += sizes.slots * slot_bytes(greedy, sizes.blocks_per_slot)
    taken += workspace_bytes(settings, greedy, sizes.slots)
    assert taken <= free - margin
    assert taken > 0.99 * (free - margin)
    assert "margin" in plan.notes[0]


def test_a_context_that_was_asked_for() -> None:
    plan = plan_pools(Settings(context=1000), SPEC, PLENTY)
    assert plan.context == 1000
    assert plan.sizes.blocks_per_slot == 8
    plan = plan_pools(Settings(context=65536), SPEC, PLENTY)
    assert plan.context == 65536
    assert "longer" in plan.notes[0]
    with pytest.raises(UsageError, match="smaller --context"):
        plan_pools(Settings(context=65536), SPEC, TOKEN * 65535)
    # It may take the margin, and the slabs of checkpoints but two.
    block = TOKEN * 128 + 8 * 8
    free = beside(512 * block) // 2
    plan = plan_pools(Settings(threads=2, context=65536), SPEC, free)
    assert (plan.context, plan.sizes.slabs) == (65536, 8 + 2)
    with pytest.raises(UsageError):
        plan_pools(Settings(threads=2, context=65536), SPEC, free - 1)


def test_a_ring_takes_room_in_every_slab() -> None:
    """Of the trunk's layers; its KV beside that is int4's."""
    ring = 8192 * 2 * 2 * (128 + 2 * 2)  # positions, K and V, heads, codes and two scales
    assert slab_bytes(SPEC, "int8ring_int4", 8192) == SLAB + ring
    assert kv_token_bytes(SPEC, "int8ring_int4") == kv_token_bytes(SPEC, "int4_g32")
    wish = Settings(threads=2, kv="int8ring_int4", kv_ring=8192)
    assert plan_pools(wish, SPEC, PLENTY).sizes.kv_ring == 8192
    free = 8 * (SLAB + ring)
    plan_pools(Settings(threads=2, kv="int4_g32"), SPEC, free)
    with pytest.raises(UsageError, match=f"8 sequences take {size(free)}"):
        plan_pools(wish, SPEC, free)


def test_codes_beside_keys_and_values_take_their_room() -> None:
    """A token takes its rows and what the engine holds beside them."""
    block = (TOKEN + TOKEN // 2) * 128 + 8 * 8
    settings = Settings(threads=2, prefix_cache_slabs=2)
    plan = plan_pools(settings, SPEC, beside(3 * 256 * block), TOKEN // 2)
    assert plan.sizes.blocks == 256
    assert plan_pools(settings, SPEC, beside(3 * 256 * block)).sizes.blocks == 2 * 256
    free = beside(390 * block) // 2
    with pytest.raises(UsageError, match=r"--kv fp8 or q4 or .* at most 49920, would fit"):
        plan_pools(Settings(context=65536, device="cpu", threads=2), SPEC, free, TOKEN // 2)


def test_what_does_not_fit_names_what_would() -> None:
    block = TOKEN * 128 + 8 * 8
    free = beside(390 * block) // 2
    with pytest.raises(UsageError) as caught:
        plan_pools(Settings(context=65536, device="cpu", threads=2), SPEC, free)
    assert "for KV in bf16" in str(caught.value)
    assert "--kv fp8 or q4 or int8_g64 or int4_g32 would hold it" in str(caught.value)
    assert "a smaller --context, at most 49920, would fit" in str(caught.value)
    with pytest.raises(UsageError, match="not enough memory"):
        plan_pools(Settings(context=65536), SPEC, TOKEN)


def test_a_pool_that_was_asked_for() -> None:
    plan = plan_pools(Settings(kv_tokens=2048, context=8192), SPEC, PLENTY)
    assert plan.sizes.blocks == 16
    assert plan.context == 2048
    assert "--kv-tokens" in plan.notes[0]
    assert plan_pools(Settings(kv_tokens=100, block_tokens=16), SPEC, PLENTY).sizes.blocks == 7
    with pytest.raises(UsageError, match="a smaller --kv-tokens, at most"):
        plan_pools(Settings(kv_tokens=1 << 20), SPEC, 1 << 28)


@given(
    st.integers(0, 1 << 34),
    st.one_of(st.just(AUTO), st.integers(16, 70000)),
    st.one_of(st.just(AUTO), st.integers(16, 70000)),
    st.integers(1, 9).map(lambda n: n * 16),
    st.integers(1, 20),
)
def test_every_plan_holds_its_context(
    free: int, context: int, kv_tokens: int, block: int, seqs: int
) -> None:
    settings = Settings(context=context, kv_tokens=kv_tokens, block_tokens=block, max_seqs=seqs)
    try:
        plan = plan_pools(settings, SPEC, free)
    except UsageError:
        return
    sizes = plan.sizes
    assert 1 <= sizes.blocks_per_slot <= sizes.blocks
    assert 0 < plan.context <= sizes.blocks_per_slot * block
    if kv_tokens == AUTO:
        assert sizes.blocks * block * TOKEN <= free - plan.margin or context != AUTO
        assert sizes.blocks * block * TOKEN <= free
    else:
        assert kv_tokens <= sizes.blocks * block < kv_tokens + block
    if context != AUTO:
        assert plan.context <= context


def test_slabs_for_checkpoints() -> None:
    def slabs(free: int = PLENTY, **changes: object) -> int:
        return plan_pools(Settings(max_seqs=3, **changes), SPEC, free).sizes.slabs - 3

    assert slabs(prefix_cache=False) == 0
    assert slabs(prefix_cache_slabs=5) == 5
    assert slabs(prefix_cache_slabs=0) == 0
    assert slabs(8 * 30 * SLAB, context=1024) == 30
    assert slabs(8 * 25 * SLAB, prefix_cache_slabs=2, context=1024) == 2


def test_the_host_tier() -> None:
    def tier(device: str, free: int = PLENTY, **settings: int) -> int:
        return host_tier_bytes(Settings(device=device, **settings), free)  # type: ignore[arg-type]

    assert (tier("cpu"), tier("cuda")) == (0, 4 << 30)
    assert tier("cuda", 8 << 30) == 2 << 30
    for device in ("cpu", "cuda"):
        assert tier(device, prefix_cache_host_bytes=0) == 0
        assert tier(device, prefix_cache_host_bytes=1 << 50) == 1 << 50


def test_a_device_is_kept_busy() -> None:
    """Wide waves, and many sequences where their slabs leave the memory to others."""
    plan = plan_pools(Settings(device="cuda"), SPEC, PLENTY)
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (32, 2048 + 32)
    heavy = dataclasses.replace(SPEC, lin_value_heads=64, layer_kinds=("linear",) * 8 + ("full",))
    plan = plan_pools(Settings(device="cuda", context=128), heavy, 8 * 31 * slab_bytes(heavy))
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (8, 2048 + 8)
    plan = plan_pools(Settings(device="cuda", max_seqs=3, wave_columns=64), SPEC, PLENTY)
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (3, 64 + 3)


@pytest.mark.parametrize(
    ("wanted", "device", "depth"),
    [("auto", "cuda", 2), ("auto", "cpu", 1), ("on", "cpu", 2), ("off", "cuda", 1)],
)
def test_a_wave_ahead_where_it_measures_better(wanted: str, device: str, depth: int) -> None:
    plan = plan_pools(Settings(submit_ahead=wanted, device=device), SPEC, PLENTY)
    assert plan.sizes.ring_depth == depth


def test_sizes_for_people() -> None:
    assert size(0) == "0 B"
    assert size(1023) == "1023 B"
    assert size(1536) == "1.5 KiB"
    assert size(3 << 30) == "3.0 GiB"
    assert size(5 << 41) == "10240.0 GiB"


def test_this_machine_has_memory() -> None:
    assert free_memory_bytes() > 0
