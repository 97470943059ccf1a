"""What benches must not get wrong."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest

import bench
from bench.churn import host_mib, trend
from bench.pace import Round, Tally, interval, rounds_for
from bench.speculation import model_of


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(bench.__path__)])
def test_every_bench_finds_what_it_imports(name: str) -> None:
    try:
        importlib.import_module(f"bench.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bench", "kslserve", "tests"):
            raise
        pytest.skip(f"a peer is not installed: {error.name}")


@pytest.mark.parametrize(
    ("readings", "growth", "flat"),
    [
        ([100.0] * 8, 0, True),
        ([100.0, 101, 100, 101, 100, 101, 100, 101], 0.33, True),
        ([100.0 + 2 * i for i in range(8)], 14, True),
        ([100.0 + 3 * i for i in range(8)], 21, False),
        ([100.0, 180, 100, 180, 180, 100, 180, 100], 0, False),  # who knows
        ([200.0 - 30 * i for i in range(8)], -210, True),
    ],
)
def test_what_is_flat(readings: list[float], growth: float, flat: bool) -> None:
    found = trend(readings, [5] * 8)
    assert found.growth == pytest.approx(growth, abs=0.01)
    assert (found.flat, found.kernel) == (flat, 0)


@pytest.mark.parametrize(("leak", "flat"), [(0, True), (3, False)])
def test_graphs_take_memory_that_is_planned(leak: float, flat: bool) -> None:
    graphs = [1, 5, 8, 12, 12, 17, 17, 20]
    found = trend([100 + 4 * made + leak * i for i, made in enumerate(graphs)], graphs)
    assert found.kernel == pytest.approx(4)
    assert found.growth == pytest.approx(7 * leak, abs=1e-6)
    assert found.flat == flat


def test_what_grows_just_as_graphs_do_is_not_flat() -> None:
    readings = [100.0, 104, 107, 112, 117, 119, 124, 128]
    assert not trend(readings, list(range(8))).flat


def test_few_readings_say_nothing() -> None:
    with pytest.raises(SystemExit, match="6 cycles"):
        trend([1.0] * 5, [0] * 5)


def test_large_mappings_are_not_read() -> None:
    def mapping(begin: int, mib: int, kib: int, rights: str = "rw-p", name: str = "") -> str:
        where = f"{begin << 20:x}-{begin + mib << 20:x} {rights} 00000000 00:00 0"
        return f"{where} {name}\nSize: 1 kB\nAnonymous:        {kib} kB\n"

    smaps = "".join([
        mapping(1, 100, 1, name="[heap]"),
        mapping(128, 40, 2) + mapping(168, 24, 0, "---p"),  # the heap of a thread
        mapping(192, 64, 4),  # one that is full
        mapping(300, 7, 8),
        mapping(310, 64, 16),
        mapping(384, 32, 32) + mapping(500, 1, 0, "---p"),
    ])  # fmt: skip
    assert host_mib(smaps) * 1024 == 1 + 2 + 4 + 8


def test_a_bench_of_drafts_has_the_model_that_it_is_about() -> None:
    assert model_of(None, device=False) == "ksl-nano"
    assert model_of(None, device=True) == "synth:27b"
    assert model_of("synth:9b", device=True) == "synth:9b"
    with pytest.raises(SystemExit, match="--device is for models without data"):
        model_of("ksl-nano", device=True)
    with pytest.raises(SystemExit, match="with --device only"):
        model_of("synth:27b", device=False)


def test_what_drafts_gain_is_measured_between_plain_runs() -> None:
    # A machine that becomes slower, evenly, and drafts that gain nothing.
    found = Round(Tally(100, 1.0), Tally(100, 1.1), Tally(100, 1.2))
    assert found.gain == pytest.approx(1.0)
    assert found.null == pytest.approx(1.2)


def test_rounds_follow_from_how_plain_runs_scatter() -> None:
    def factors(deviation: float) -> list[float]:
        rng = np.random.default_rng(3)
        return list(np.exp(rng.normal(0.0, deviation, 4000)))

    assert rounds_for(factors(0.001), 9, 200) == 9
    assert rounds_for(factors(0.5), 9, 200) == 200
    count = rounds_for(factors(0.06), 9, 200)
    assert 60 < count < 85
    gains = np.exp(np.random.default_rng(4).normal(0.0, 0.06 * 0.75**0.5, (500, count)))
    widths = [(high - low) / 2 for _, low, high in map(interval, gains.tolist())]
    assert np.mean(widths) == pytest.approx(0.015, rel=0.15)
