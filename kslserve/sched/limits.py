"""The scheduler's bounds, counts and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kslserve.metrics import Metrics

WAVE_MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000)


@dataclass(frozen=True, slots=True)
class SchedLimits:
    """From the settings. max_queue: sequences that wait beyond those that can start at once.
    wave_columns: prompt columns of a wave. A timeout of 0 is none. context: tokens of a
    sequence."""

    max_seqs: int
    max_queue: int
    wave_columns: int
    wave_target_ms: float
    decode_gap_ms: float
    queue_timeout_s: float
    request_timeout_s: float
    context: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts for health and metrics. fatal: why nothing can run any more, or None."""

    queued: int
    running: int
    blocks_free: int
    blocks_total: int
    waves: int
    in_flight: bool
    prompt_tokens: int
    output_tokens: int
    fatal: str | None


class SchedMetrics:
    """The registry's objects, looked up once."""

    __slots__ = (
        "blocks_free", "ends", "output_tokens", "prompt_tokens", "queued", "running", "wave_ms",
        "waves",
    )  # fmt: skip

    def __init__(self, metrics: Metrics) -> None:
        self.waves = metrics.counter("waves_total", "Waves completed")
        self.wave_ms = metrics.histogram("wave_ms", "Wave time in milliseconds", WAVE_MS_BUCKETS)
        self.prompt_tokens = metrics.counter("tokens_prompt_total", "Prompt positions computed")
        self.output_tokens = metrics.counter("tokens_output_total", "Tokens sampled")
        self.running = metrics.gauge("requests_running", "Sequences that hold memory")
        self.queued = metrics.gauge("queue_depth", "Sequences that wait for memory")
        self.blocks_free = metrics.gauge("blocks_free", "KV blocks that are free")
        self.ends = metrics.labelled("sequences_ended_total", "Sequences by end", "reason")
