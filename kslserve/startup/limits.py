"""The bounds of each layer, from the settings."""

from __future__ import annotations

from kslserve.config import Settings
from kslserve.http.flow import HttpLimits
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.limits import SchedLimits
from kslserve.startup.backend import Backend

AHEAD_BYTES = 32 << 20  # of a small model, a turn of some thousand tokens


def http_limits(settings: Settings) -> HttpLimits:
    """Those of connections and requests."""
    return HttpLimits(
        body_bytes=settings.max_body_bytes,
        io_timeout_s=settings.io_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        max_requests=settings.max_requests,
    )


def sched_limits(settings: Settings, backend: Backend) -> SchedLimits:
    """Those of sequences and waves, as far as the open engine allows."""
    info = backend.engine.info
    cache = None
    if settings.prefix_cache:
        cache = CachePolicy(host_bytes=backend.host_bytes)
    return SchedLimits(
        max_seqs=info.slots,
        max_queue=settings.max_queue,
        wave_columns=info.wave_columns - info.slots,
        wave_target_ms=settings.wave_target_ms,
        decode_gap_ms=settings.decode_gap_ms,
        queue_timeout_s=settings.queue_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        context=backend.model.context,
        cache=cache,
        submit_ahead=info.ring_depth > 1,
        idle_return_s=backend.idle_return_s,
        ahead_bytes=0 if settings.device == "cuda" else AHEAD_BYTES,
        spec=backend.drafts,
    )
