"""What health checks and metrics see of the scheduler, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kslserve.sched.cache.manager import PrefixCache
    from kslserve.sched.flights import Flights
    from kslserve.sched.limits import SchedMetrics
    from kslserve.sched.memory import Memory
    from kslserve.sched.roster import Roster


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Checkpoints by tier (one may be in several), bytes of the lower tiers, and what happened
    since the start: admissions from a checkpoint and without, checkpoints made and evicted from the
    device, prompt tokens that were not computed, files read, written and unusable. image_bytes:
    host memory of all images, those that move and the room kept for the next ones included.
    path_bytes: host memory of the tokens of known prefixes; a checkpoint of any tier has one."""

    enabled: bool
    device: int
    host: int
    host_bytes: int
    image_bytes: int
    disk: int
    disk_bytes: int
    hits: int
    misses: int
    builds: int
    evictions: int
    tokens_saved: int
    reads: int
    writes: int
    bad_files: int
    path_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts for health and metrics. blocks_free: those that can be promised to new sequences;
    blocks_cached of them hold checkpoints. slabs_free: held by nobody. prefilling: of the running
    ones, those whose prompt is not computed. graphs: launch sequences that a device keeps,
    with graph_kernels launches; graphs_made: so far. wave_age_s: how long the wave in flight has
    been so, or how long ago the last one ended; None before the first. last_error: what the engine
    said last. fatal: why nothing can run any more, or None."""

    queued: int
    running: int
    prefilling: int
    slots_free: int
    slots_total: int
    slabs_free: int
    slabs_total: int
    blocks_free: int
    blocks_cached: int
    blocks_total: int
    waves: int
    in_flight: bool
    graphs: int
    graph_kernels: int
    graphs_made: int
    wave_age_s: float | None
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    cache: CacheSnapshot
    last_error: str | None
    fatal: str | None


def look(
    memory: Memory,
    roster: Roster,
    flights: Flights,
    cache: PrefixCache,
    metrics: SchedMetrics,
    now: float,
    fatal: str | None,
) -> Snapshot:
    """The state at this moment, between two turns."""
    age = None if flights.sent_at is None else round(now - flights.sent_at, 3)
    progress = flights.progress()
    return Snapshot(
        queued=len(roster.queue),
        running=len(roster.running),
        prefilling=sum(1 for s in roster.running if s.prompt_left),
        slots_free=memory.slots.free,
        slots_total=memory.slots.count,
        slabs_free=memory.slabs.free,
        slabs_total=memory.slabs.count,
        blocks_free=memory.available,
        blocks_cached=memory.blocks.evictable,
        blocks_total=memory.blocks.count,
        waves=int(metrics.waves.value),
        in_flight=flights.count > 0,
        graphs=progress.graphs,
        graph_kernels=progress.graph_kernels,
        graphs_made=progress.graphs_made,
        wave_age_s=age,
        preemptions=int(metrics.events["preemption"].value),
        prompt_tokens=int(metrics.prompt_tokens.value),
        output_tokens=int(metrics.output_tokens.value),
        cache=cache.snapshot(),
        last_error=flights.last_error,
        fatal=fatal,
    )
