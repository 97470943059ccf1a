"""Sizes of the engine's pools, from the settings, the model's shape and the memory there is."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from kslserve.config import AUTO, Settings
from kslserve.engine.budget import KV_OF, kv_problem, kv_token_bytes, slab_bytes
from kslserve.engine.model import ModelSpec, PoolSizes
from kslserve.errors import UsageError

_CACHE_SLABS_MIN, _CACHE_SLABS_MAX = 2, 64
_CACHE_SHARE = 8  # one part in so many of the free memory may be slabs of checkpoints
_SEQUENCES, _DEVICE_SEQUENCES = 8, 32
_COLUMNS, _DEVICE_COLUMNS = 512, 2048


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """context: longest timeline of a request. notes: what was changed to make it fit."""

    sizes: PoolSizes
    context: int
    notes: tuple[str, ...] = ()


def kv_format(settings: Settings) -> str:
    """The KV format in use; the default is fixed, since one that followed memory would change
    output between two starts."""
    return "bf16" if settings.kv == "auto" else settings.kv


def cache_slabs(settings: Settings, spec: ModelSpec, free_bytes: int) -> int:
    """Slabs for checkpoints: as set, or a share of the free memory within bounds; none without the
    prefix cache."""
    if not settings.prefix_cache:
        return 0
    if settings.prefix_cache_slabs != AUTO:
        return settings.prefix_cache_slabs
    fitting = max(free_bytes, 0) // _CACHE_SHARE // slab_bytes(spec)
    return min(max(fitting, _CACHE_SLABS_MIN), _CACHE_SLABS_MAX)


def sequences(settings: Settings, spec: ModelSpec, free_bytes: int) -> int:
    """Sequences at once: as set, or many on a device whose memory they leave to others."""
    if settings.max_seqs != AUTO:
        return settings.max_seqs
    room = max(free_bytes, 0) // _CACHE_SHARE
    many = settings.device == "cuda" and _DEVICE_SEQUENCES * slab_bytes(spec) <= room
    return _DEVICE_SEQUENCES if many else _SEQUENCES


def columns(settings: Settings) -> int:
    """Prompt columns of a wave: as set, or what the device needs to be busy."""
    if settings.wave_columns != AUTO:
        return settings.wave_columns
    return _DEVICE_COLUMNS if settings.device == "cuda" else _COLUMNS


def plan_pools(settings: Settings, spec: ModelSpec, free_bytes: int) -> PoolPlan:
    """Size the pools. free_bytes: memory that is left beside the weights; half of it may be KV.

    `auto` context is the model's maximum, or what fits into that half; `auto` KV holds as many
    whole contexts as fit, at most one per sequence; what sequences do not use of it holds
    checkpoints. Raises UsageError for a context that cannot
    fit.
    """
    block = settings.block_tokens
    token_bytes = kv_token_bytes(spec, kv_format(settings))
    slots = sequences(settings, spec, free_bytes)
    notes: list[str] = []
    half = max(free_bytes, 0) // 2 // token_bytes // block * block
    context = settings.context
    if context == AUTO:
        context = spec.max_positions
        if settings.kv_tokens == AUTO and context > half:
            if half < block:
                raise UsageError("there is not enough free memory for the KV pool of this model.")
            context = half
            notes.append(
                f"the context is {context} tokens, not the model's {spec.max_positions}: more does "
                "not fit into half of the free memory"
            )
    elif context > spec.max_positions:
        notes.append(f"the context is longer than the {spec.max_positions} tokens the model knows")
    blocks_per_context = math.ceil(context / block)
    if settings.kv_tokens != AUTO:
        blocks = math.ceil(settings.kv_tokens / block)
        if blocks < blocks_per_context:
            notes.append(f"--kv-tokens limits a request to {blocks * block} tokens")
    else:
        needed = blocks_per_context * block * token_bytes
        if needed > max(free_bytes, 0):
            raise UsageError(
                f"a context of {context} tokens needs {size(needed)} for KV in "
                f"{kv_format(settings)}, but {size(max(free_bytes, 0))} are free: "
                f"{_what_fits(settings, spec, blocks_per_context * block, free_bytes)}."
            )
        contexts = max(1, min(slots, half // (blocks_per_context * block)))
        blocks = contexts * blocks_per_context
    sizes = PoolSizes(
        slots=slots,
        slabs=slots + cache_slabs(settings, spec, free_bytes),
        blocks=blocks,
        block_tokens=block,
        blocks_per_slot=min(blocks, blocks_per_context),
        # Decode rows ride beside a full prompt chunk.
        wave_columns=columns(settings) + slots,
        ring_depth=2 if settings.submit_ahead else 1,
    )
    return PoolPlan(sizes, min(context, blocks * block), tuple(notes))


def _what_fits(settings: Settings, spec: ModelSpec, tokens: int, free_bytes: int) -> str:
    """Advice: formats of the device that hold so many tokens, and the context that this one
    holds."""
    kv, block = kv_format(settings), settings.block_tokens
    device = "cuda" if settings.device == "cuda" else "cpu"
    formats = [
        other
        for other in KV_OF[device]
        if kv_problem(spec, other) is None and tokens * kv_token_bytes(spec, other) <= free_bytes
    ]
    most = max(free_bytes, 0) // kv_token_bytes(spec, kv) // block * block
    advice = [f"--kv {' or '.join(formats)} would hold it"] if formats else []
    if most:
        advice.append(f"a smaller --context, at most {most}, would fit")
    return "; ".join(advice) or "no format and no context fits; free some memory"


def free_memory_bytes() -> int:
    """Memory that can be taken without pushing anything out, as the system says; else all it
    has."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
