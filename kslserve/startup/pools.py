"""Sizes of the engine's pools, from the settings, the model's shape and the memory there is."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from kslserve.config import Settings
from kslserve.engine.budget import KV_OF, kv_problem, kv_token_bytes, ring_bytes, slot_bytes
from kslserve.engine.budget import slab_bytes as engine_slab_bytes
from kslserve.engine.budget import workspace_bytes as cpu_workspace_bytes
from kslserve.engine.device_budget import device_workspace_bytes, driver_bytes
from kslserve.engine.model import ModelSpec, PoolSizes
from kslserve.errors import UsageError
from kslserve.setting import AUTO

_CACHE_SLABS_MIN, _CACHE_SLABS_MAX = 2, 64
_CACHE_SHARE = 8  # one part in so many of the free memory may be slabs of checkpoints
_HOST_TIER = 4 << 30
_SEQUENCES, _DEVICE_SEQUENCES = 8, 32
_COLUMNS, _DEVICE_COLUMNS = 512, 2048


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """context: longest timeline of a request. margin: bytes that automatic sizes left alone. notes:
    what was changed to make it fit."""

    sizes: PoolSizes
    context: int
    margin: int
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
    fitting = max(free_bytes, 0) // _CACHE_SHARE // slab_bytes(settings, spec)
    return min(max(fitting, _CACHE_SLABS_MIN), _CACHE_SLABS_MAX)


def host_tier_bytes(settings: Settings, free_bytes: int) -> int:
    """Host memory for checkpoints. free_bytes: of the machine. A device has too little memory for
    many; where the pools are in the machine's own, a copy there would be a second one."""
    if settings.prefix_cache_host_bytes != AUTO:
        return settings.prefix_cache_host_bytes
    return min(_HOST_TIER, free_bytes // 4) if settings.device == "cuda" else 0


def sequences(settings: Settings, spec: ModelSpec, free_bytes: int) -> int:
    """Sequences at once: as set, or many on a device whose memory they leave to others."""
    if settings.max_seqs != AUTO:
        return settings.max_seqs
    room = max(free_bytes, 0) // _CACHE_SHARE
    many = settings.device == "cuda" and _DEVICE_SEQUENCES * slab_bytes(settings, spec) <= room
    return _DEVICE_SEQUENCES if many else _SEQUENCES


def columns(settings: Settings) -> int:
    """Prompt columns of a wave: as set, or what the device needs to be busy."""
    if settings.wave_columns != AUTO:
        return settings.wave_columns
    return _DEVICE_COLUMNS if settings.device == "cuda" else _COLUMNS


def margin_bytes(settings: Settings, free_bytes: int) -> int:
    """Memory that automatic sizes leave alone. Of the machine's: 15 %, at least 2 GiB, for the
    compilers and browsers beside us and the file cache. Of a device's: 5 %, at least 512 MiB, for a
    screen and the driver. Never more than half of what there is."""
    percent, least = (5, 512 << 20) if settings.device == "cuda" else (15, 2 << 30)
    return min(max(free_bytes * percent // 100, least), free_bytes // 2)


def submit_ahead(settings: Settings) -> bool:
    """Whether a second wave is kept in the engine's ring. It saves a device the moment between two
    waves; where the engine runs on the host's own cores, what the host does beside a wave takes
    time from it anyway."""
    return settings.submit_ahead == "on" or (
        settings.submit_ahead == "auto" and settings.device == "cuda"
    )


def plan_pools(
    settings: Settings, spec: ModelSpec, free_bytes: int, code_bytes: int = 0
) -> PoolPlan:
    """Size the pools. free_bytes: memory that is left beside the weights. code_bytes: of what the
    engine holds of a token beside its keys and values.

    `auto` context is the model's maximum, or what fits once everything else and the margin have
    their part. `auto` KV holds as many whole contexts as fit, at most one per sequence and on the
    machine's memory in half of what is there; what sequences do not use of it holds checkpoints.
    What was asked for may take the margin too. UsageError for what cannot fit, with the setting
    to lower.
    """
    free_bytes = max(free_bytes, 0)
    block, kv = settings.block_tokens, kv_format(settings)
    token = kv_token_bytes(spec, kv) + code_bytes
    block_size = token * block
    slots = sequences(settings, spec, free_bytes)
    cached = cache_slabs(settings, spec, free_bytes)
    if settings.prefix_cache_slabs == AUTO:
        spare = max(cached - _CACHE_SLABS_MIN, 0)  # checkpoints give way to a context
    else:
        spare = 0
    margin = margin_bytes(settings, free_bytes)
    notes: list[str] = []

    def blocks_beside(cached: int, margin: int) -> int:
        """KV blocks for which there is room; what they take elsewhere is counted for one slot."""
        room = free_bytes - margin - _fixed_bytes(settings, spec, slots, cached)
        return max(room, 0) // (block_size + 8 * slots)

    most = blocks_beside(cached - spare, 0)
    if not most:
        raise UsageError(_too_little(settings, spec, slots, cached - spare, free_bytes))
    context = settings.context
    if context == AUTO:
        context = spec.max_positions
        fitting = blocks_beside(cached - spare, margin)
        if settings.kv_tokens == AUTO and math.ceil(context / block) > fitting:
            context = max(fitting, 1) * block
            notes.append(
                f"the context is {context} tokens, not the model's {spec.max_positions}: more does "
                f"not fit beside a margin of {size(margin)}"
            )
    elif context > spec.max_positions:
        notes.append(f"the context is longer than the {spec.max_positions} tokens the model knows")
    per_context = math.ceil(context / block)
    if settings.kv_tokens != AUTO:
        blocks = math.ceil(settings.kv_tokens / block)
        if blocks < per_context:
            notes.append(f"--kv-tokens limits a request to {blocks * block} tokens")
        if blocks > most:
            raise UsageError(
                f"--kv-tokens {settings.kv_tokens} needs {size(blocks * block_size)} in {kv}, but "
                f"{size(most * block_size)} are free for it: "
                f"{_what_fits(settings, spec, blocks * block, most, token, '--kv-tokens')}."
            )
    else:
        if per_context > most:
            raise UsageError(
                f"a context of {context} tokens needs {size(per_context * block_size)} for KV in "
                f"{kv}, but {size(most * block_size)} are free for it: "
                f"{_what_fits(settings, spec, per_context * block, most, token, '--context')}."
            )
        beside = blocks_beside(cached, margin)
        room = beside if settings.device == "cuda" else beside // 2
        blocks = max(1, min(slots, room // per_context)) * per_context
    while spare and blocks > blocks_beside(cached, margin):
        cached -= 1
        spare -= 1
    sizes = PoolSizes(
        slots=slots,
        slabs=slots + cached,
        blocks=blocks,
        block_tokens=block,
        blocks_per_slot=min(blocks, per_context),
        # Decode rows ride beside a full prompt chunk.
        wave_columns=columns(settings) + slots,
        ring_depth=2 if submit_ahead(settings) else 1,
        kv_ring=settings.kv_ring,
    )
    return PoolPlan(sizes, min(context, blocks * block), margin, tuple(notes))


def slab_bytes(settings: Settings, spec: ModelSpec) -> int:
    """One copy of a sequence's state beside its KV blocks."""
    return engine_slab_bytes(spec, kv_format(settings), settings.kv_ring)


def workspace_bytes(settings: Settings, spec: ModelSpec, slots: int) -> int:
    """Activations of the widest wave, and what the backend holds beside them."""
    wide = columns(settings) + slots
    if settings.device == "cuda":
        blocks = math.ceil(spec.max_positions / settings.block_tokens)
        kv = kv_format(settings)
        activations = device_workspace_bytes(spec, kv, slots, wide, settings.block_tokens, blocks)
        return driver_bytes(spec) + activations
    threads = settings.threads or _cores()
    int8, kv = settings.activations != "float", kv_format(settings)
    return cpu_workspace_bytes(spec, slots, wide, threads, int8, kv)


def _cores() -> int:
    """Threads that the engine takes by itself."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fixed_bytes(settings: Settings, spec: ModelSpec, slots: int, cached: int) -> int:
    """What everything but KV takes."""
    slabs = (slots + cached) * slab_bytes(settings, spec)
    return slabs + slots * slot_bytes(spec, 0) + workspace_bytes(settings, spec, slots)


def _too_little(
    settings: Settings, spec: ModelSpec, slots: int, cached: int, free_bytes: int
) -> str:
    """Why there is no room for any KV, and what takes it."""
    slab = slab_bytes(settings, spec)
    return (
        f"there is not enough memory: {size(free_bytes)} are free beside the weights, and "
        f"{slots} sequences take {size(slots * slab)} (--max-seqs), {cached} "
        f"checkpoints {size(cached * slab)} (--prefix-cache-slabs), the widest wave "
        f"{size(workspace_bytes(settings, spec, slots))} (--wave-columns)."
    )


def _what_fits(
    settings: Settings, spec: ModelSpec, tokens: int, blocks: int, token: int, flag: str
) -> str:
    """Advice where `blocks` blocks of `token` bytes a token are free: formats of the device that
    hold so many tokens there, and what this one holds."""
    block = settings.block_tokens
    free = blocks * block * token
    device = "cuda" if settings.device == "cuda" else "cpu"
    formats = [
        other
        for other in KV_OF[device]
        if other != kv_format(settings)
        and kv_problem(spec, other) is None
        and not ring_bytes(spec, other)  # which takes room in every slab too
        and tokens * kv_token_bytes(spec, other) <= free
    ]
    advice = [f"--kv {' or '.join(formats)} would hold it"] if formats else []
    advice.append(f"a smaller {flag}, at most {blocks * block}, would fit")
    return "; ".join(advice)


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
