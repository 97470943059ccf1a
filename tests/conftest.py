"""Settings of the whole suite: hypothesis draws the same examples in every run, and no test has a
wall-clock threshold."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
