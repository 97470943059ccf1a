"""Every bound of the settings reaches the layer that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kslserve.config import Settings
from kslserve.http.flow import HttpLimits
from kslserve.sched.limits import SchedLimits
from kslserve.startup.backend import Backend, open_backend
from kslserve.startup.limits import AHEAD_BYTES, http_limits, sched_limits

ENGINE = {"engine": "fake", "context": 2048, "max_seqs": 3, "wave_columns": 96}


def opened(**changes: object) -> tuple[Settings, Backend]:
    settings = Settings(**{**ENGINE, **changes})  # type: ignore[arg-type]
    return settings, open_backend(settings, print)


def test_connections_and_requests() -> None:
    settings = Settings(
        max_body_bytes=4097, io_timeout_s=1.5, idle_timeout_s=2.5, write_timeout_s=3.5,
        max_requests=6,
    )  # fmt: skip
    assert http_limits(settings) == HttpLimits(
        body_bytes=4097, io_timeout_s=1.5, idle_timeout_s=2.5, write_timeout_s=3.5, max_requests=6
    )


def test_sequences_and_waves() -> None:
    settings, backend = opened(
        max_queue=7, queue_timeout_s=8.5, request_timeout_s=9.5, wave_target_ms=10.5,
        decode_gap_ms=11.5, idle_return_s=12.5, speculation="off", prefix_cache_host_bytes=13,
    )  # fmt: skip
    limits = sched_limits(settings, backend)
    assert limits.cache is not None
    assert limits.cache.host_bytes == 13
    assert "tiers     checkpoints also in 13 B of host memory" in backend.lines
    assert limits == SchedLimits(
        max_seqs=3, max_queue=7, wave_columns=96, wave_target_ms=10.5, decode_gap_ms=11.5,
        queue_timeout_s=8.5, request_timeout_s=9.5, context=2048, cache=limits.cache,
        submit_ahead=False, spec=None, idle_return_s=12.5, ahead_bytes=AHEAD_BYTES,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_switched(tmp_path: Path, wanted: bool) -> None:
    """Without the prefix cache there are no slabs for it and no folder either."""
    settings, backend = opened(
        prefix_cache=wanted,
        prefix_cache_dir=str(tmp_path / "cache"),
        submit_ahead="on" if wanted else "off",
        speculation="ngram" if wanted else "off",
    )
    limits = sched_limits(settings, backend)
    assert (limits.cache is not None) is wanted
    assert limits.submit_ahead is wanted
    assert (limits.spec is not None) is wanted
    assert (backend.disk is not None) is wanted
    assert (backend.engine.info.slabs > backend.engine.info.slots) is wanted
    assert (tmp_path / "cache").exists() is wanted
    told = [line for line in backend.lines if line.startswith("tiers")]
    assert told == [f"tiers     checkpoints also in 20.0 GiB in {tmp_path / 'cache'}"] * wanted
