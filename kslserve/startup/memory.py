"""The memory plan of a device: what a model, a context and a KV format take, before anything is
opened."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kslserve.engine import budget
from kslserve.engine.device_budget import device_workspace_bytes, driver_bytes
from kslserve.engine.model import ModelSpec
from kslserve.errors import UsageError

CONTEXT_MAX = 1 << 28  # what a block table can span


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What the plan is for. memory_bytes: of the device. checkpoints: prefix checkpoints held on
    the device. wave_columns: prompt columns of a wave; every sequence may add a decoding one.
    kv_ring: positions in the ring of int8ring_int4."""

    memory_bytes: int
    context: int
    kv: str
    max_seqs: int
    checkpoints: int = 4
    block_tokens: int = 128
    wave_columns: int = 2048  # as on a device
    kv_ring: int = budget.KV_RING_TOKENS


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part. workspace: activations, and what the driver takes. A checkpoint is a slab
    and a private tail block. largest_context: of all sequences at once; 0 when not even one block
    fits."""

    wish: MemoryWish
    weights: int
    workspace: int
    kv: int
    kv_token: int
    slabs: int
    slab: int
    checkpoints: int
    slots: int
    total: int
    headroom: int
    fits: bool
    largest_context: int


def plan_memory(spec: ModelSpec, weight_bytes: int, wish: MemoryWish) -> MemoryPlan:
    """The plan for a model whose encoded weights take weight_bytes. UsageError for a KV format that
    does not take its heads."""
    problem = budget.kv_problem(spec, wish.kv)
    if problem is not None:
        raise UsageError(problem)
    block = budget.block_bytes(spec, wish.kv, wish.block_tokens)
    slab = budget.slab_bytes(spec, wish.kv, wish.kv_ring)
    columns = wish.wave_columns + wish.max_seqs
    checkpoints = wish.checkpoints * (slab + block)

    def parts(blocks: int) -> tuple[int, int, int]:
        """KV, slots and workspace with `blocks` KV blocks per sequence."""
        workspace = driver_bytes(spec) + device_workspace_bytes(
            spec, wish.kv, wish.max_seqs, columns, wish.block_tokens, blocks
        )
        slots = wish.max_seqs * budget.slot_bytes(spec, blocks)
        return wish.max_seqs * blocks * block, slots, workspace

    fixed = weight_bytes + wish.max_seqs * slab + checkpoints
    kv, slots, workspace = parts(math.ceil(wish.context / wish.block_tokens))
    total = fixed + kv + slots + workspace
    most, least = CONTEXT_MAX // wish.block_tokens + 1, 0
    while most - least > 1:  # `least` blocks fit or are none, `most` do not fit or are too many
        middle = (most + least) // 2
        if fixed + sum(parts(middle)) <= wish.memory_bytes:
            least = middle
        else:
            most = middle
    return MemoryPlan(
        wish=wish,
        weights=weight_bytes,
        workspace=workspace,
        kv=kv,
        kv_token=budget.kv_token_bytes(spec, wish.kv),
        slabs=wish.max_seqs * slab,
        slab=slab,
        checkpoints=checkpoints,
        slots=slots,
        total=total,
        headroom=wish.memory_bytes - total,
        fits=total <= wish.memory_bytes,
        largest_context=least * wish.block_tokens,
    )
