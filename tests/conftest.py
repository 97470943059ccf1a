"""Settings of the whole suite: hypothesis draws the same examples in every run, and no test has a
wall-clock threshold. `--fuzz-seconds` sets how long each fuzzing target runs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=3.0, help="how long each fuzzing target runs"
    )


@pytest.fixture(scope="session")
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--fuzz-seconds")
    return seconds
