"""The scheduler's bounds and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kslserve.metrics import Metrics
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.snapshot import Snapshot
from kslserve.sched.spec.policy import SpecPolicy

WAVE_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30,
)  # fmt: skip
# What can go not as planned. An admission recovers where the engine refuses a wave with several
# newcomers and takes them one at a time; it fails where it refuses a wave with one.
EVENTS = (
    "queue_timeout", "request_timeout", "admission_recovery", "admission_failure",
    "native_failure", "refused_wave", "preemption", "mask_late",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedLimits:
    """From the settings. max_queue: sequences that wait beyond those that can start at once.
    wave_columns: prompt columns of a wave. A timeout of 0 is none. context: tokens of a
    sequence. cache: None for no prefix cache. submit_ahead: keep a second wave in the engine's
    ring, while nothing drafts. spec: None for no speculation. idle_return_s: when unused memory
    goes back to the system, and the step in which checkpoints age (idle.py); 0: never. ahead_bytes:
    memory that is touched for the next prompt once nothing runs (ahead.py)."""

    max_seqs: int
    max_queue: int
    wave_columns: int
    wave_target_ms: float
    decode_gap_ms: float
    queue_timeout_s: float
    request_timeout_s: float
    context: int
    cache: CachePolicy | None = None
    submit_ahead: bool = False
    spec: SpecPolicy | None = None
    idle_return_s: float = 0.0
    ahead_bytes: int = 0


class SchedMetrics:
    """The registry's objects, looked up once."""

    __slots__ = (
        "blocks", "cache", "drafts", "ends", "events", "gap", "graph_kernels", "graphs",
        "graphs_made", "output_tokens", "prompt_tokens", "requests", "rounds", "saved", "slabs",
        "tier_bytes", "tiers", "wave", "waves",
    )  # fmt: skip

    def __init__(self, metrics: Metrics) -> None:
        self.waves = metrics.counter("waves_total", "Waves completed")
        self.wave = metrics.histogram("wave_seconds", "Time of a wave in the engine", WAVE_SECONDS)
        self.gap = metrics.histogram(
            "inter_token_seconds", "Time between tokens of a sequence", WAVE_SECONDS
        )
        tokens = metrics.labelled(
            "tokens_total", "Prompt positions computed and tokens sampled", "kind"
        )
        self.prompt_tokens, self.output_tokens = tokens["prompt"], tokens["generated"]
        self.requests = metrics.labelled("requests", "Sequences by state", "state", "gauge")
        self.ends = metrics.labelled("sequences_ended_total", "Sequences by end", "reason")
        self.events = metrics.labelled("scheduler_events_total", "What went not as planned", "kind")
        for kind in EVENTS:
            self.events[kind].value = 0
        self.blocks = metrics.labelled("kv_blocks", "KV blocks by state", "state", "gauge")
        self.slabs = metrics.labelled("slabs", "Slabs by state", "state", "gauge")
        self.tiers = metrics.labelled(
            "prefix_cache_checkpoints", "Checkpoints by tier", "tier", "gauge"
        )
        self.tier_bytes = metrics.labelled(
            "prefix_cache_bytes", "Bytes of checkpoints below the device", "tier", "gauge"
        )
        self.cache = metrics.labelled(
            "prefix_cache_events_total", "Admissions from checkpoints, and what was done to them",
            "kind",
        )  # fmt: skip
        self.drafts = metrics.labelled(
            "speculative_tokens_total", "Drafts that were verified, and those that agreed", "kind"
        )
        self.drafts["drafted"].value = self.drafts["committed"].value = 0
        self.rounds = metrics.counter("speculative_rounds_total", "Rows that verified drafts")
        self.saved = metrics.counter(
            "prefix_cache_tokens_saved_total", "Prompt positions that were not computed"
        )

        self.graphs = metrics.gauge(
            "graphs", "Launch sequences that the device keeps for waves of equal shape"
        )
        self.graph_kernels = metrics.gauge("graph_kernels", "Launches in those sequences")
        self.graphs_made = metrics.counter("graphs_made_total", "Launch sequences made for it")

    def publish(self, now: Snapshot) -> None:
        """Bring gauges, and counters that are kept elsewhere, to the state of a snapshot."""
        self.requests["queued"].value = now.queued
        self.requests["prefilling"].value = now.prefilling
        self.requests["decoding"].value = now.running - now.prefilling
        self.blocks["free"].value = now.blocks_free
        self.blocks["cached"].value = now.blocks_cached
        self.blocks["total"].value = now.blocks_total
        self.slabs["free"].value, self.slabs["total"].value = now.slabs_free, now.slabs_total
        self.graphs.value, self.graphs_made.value = now.graphs, now.graphs_made
        self.graph_kernels.value = now.graph_kernels
        cache = now.cache
        self.tiers["device"].value = cache.device
        self.tiers["host"].value = cache.host
        self.tiers["disk"].value = cache.disk
        self.tier_bytes["host"].value = cache.host_bytes
        self.tier_bytes["disk"].value = cache.disk_bytes
        self.cache["hit"].value, self.cache["miss"].value = cache.hits, cache.misses
        self.cache["build"].value, self.cache["evict"].value = cache.builds, cache.evictions
        self.cache["read"].value, self.cache["write"].value = cache.reads, cache.writes
        self.saved.value = cache.tokens_saved
