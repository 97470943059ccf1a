"""Pool sizes from settings, shape and memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.config import AUTO, Settings
from kslserve.engine.model import ModelSpec
from kslserve.errors import UsageError
from kslserve.startup.pools import free_memory_bytes, kv_token_bytes, plan_pools, size

SPEC = ModelSpec(
    vocab=8192, hidden=256, intermediate=896, layer_kinds=("linear", "full"), heads=4, kv_heads=2,
    head_dim=128, rotary_dims=32, lin_key_heads=2, lin_value_heads=4, lin_key_dim=128,
    lin_value_dim=128, conv_taps=4, mtp_layers=1, token_limit=8192, rope_theta=1e7, norm_eps=1e-6,
    max_positions=32768,
)  # fmt: skip
TOKEN = 2 * 2 * 2 * 128 * 2  # layers (one is the MTP layer), K and V, heads, dim, bf16
PLENTY = 1 << 40


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


def test_with_less_memory_fewer_contexts() -> None:
    plan = plan_pools(Settings(), SPEC, 2 * TOKEN * 32768 * 3 + TOKEN)
    assert plan.context == 32768
    assert plan.sizes.blocks == 3 * 256


def test_with_little_memory_a_shorter_context() -> None:
    plan = plan_pools(Settings(), SPEC, 2 * TOKEN * 1000)
    assert plan.context == 7 * 128
    assert plan.sizes.blocks == 7
    assert len(plan.notes) == 1
    with pytest.raises(UsageError):
        plan_pools(Settings(), SPEC, 2 * TOKEN * 100)


def test_a_context_that_was_asked_for() -> None:
    plan = plan_pools(Settings(context=1000), SPEC, PLENTY)
    assert plan.context == 1000
    assert plan.sizes.blocks_per_slot == 8
    plan = plan_pools(Settings(context=65536), SPEC, PLENTY)
    assert plan.context == 65536
    assert "longer" in plan.notes[0]
    with pytest.raises(UsageError, match="smaller --context"):
        plan_pools(Settings(context=65536), SPEC, TOKEN * 65535)


def test_what_does_not_fit_names_what_would() -> None:
    with pytest.raises(UsageError) as caught:
        plan_pools(Settings(context=65536, device="cpu"), SPEC, TOKEN * 50000)
    assert "for KV in bf16" in str(caught.value)
    assert "--kv fp8 or q4 or int8_g64 or int4_g32 would hold it" in str(caught.value)
    assert "at most 49920, would fit" in str(caught.value)
    with pytest.raises(UsageError, match="no format and no context fits"):
        plan_pools(Settings(context=65536), SPEC, TOKEN)


def test_a_pool_that_was_asked_for() -> None:
    plan = plan_pools(Settings(kv_tokens=2048, context=8192), SPEC, 0)
    assert plan.sizes.blocks == 16
    assert plan.context == 2048
    assert "--kv-tokens" in plan.notes[0]
    assert plan_pools(Settings(kv_tokens=100, block_tokens=16), SPEC, 0).sizes.blocks == 7


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
    # One linear layer: 4 heads of 128 x 128, 3 columns of 2 * 2 * 128 + 4 * 128, and the hidden.
    slab = 4 * (4 * 128 * 128 + 3 * 1024 + 256)
    assert slabs(8 * 20 * slab, context=1024) == 20
    assert slabs(8 * slab, context=128) == 2


def test_a_device_is_kept_busy() -> None:
    """Wide waves, and many sequences where their slabs leave the memory to others."""
    plan = plan_pools(Settings(device="cuda"), SPEC, PLENTY)
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (32, 2048 + 32)
    slab = 4 * (4 * 128 * 128 + 3 * 1024 + 256)
    plan = plan_pools(Settings(device="cuda", context=128), SPEC, 8 * 31 * slab)
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (8, 2048 + 8)
    plan = plan_pools(Settings(device="cuda", max_seqs=3, wave_columns=64), SPEC, PLENTY)
    assert (plan.sizes.slots, plan.sizes.wave_columns) == (3, 64 + 3)


def test_sizes_for_people() -> None:
    assert size(0) == "0 B"
    assert size(1023) == "1023 B"
    assert size(1536) == "1.5 KiB"
    assert size(3 << 30) == "3.0 GiB"
    assert size(5 << 41) == "10240.0 GiB"


def test_this_machine_has_memory() -> None:
    assert free_memory_bytes() > 0
