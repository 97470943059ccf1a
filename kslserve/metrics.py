"""Counters, gauges and histograms as plain numbers, and their Prometheus text.

Updates are attribute arithmetic: no locks (one thread updates a metric) and no look-up by name on a
hot path; owners keep the object that `Metrics` hands out.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TypeVar

PREFIX = "kslserve_"


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Gauge:
    """A number that moves both ways."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount


class Histogram:
    """Cumulative counts of observations at or below each bound."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("histogram bounds must increase")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


class Labelled:
    """Counters (or, by `kind`, gauges) of one name, one per value of one label; made at first use
    of a value."""

    __slots__ = ("kind", "label", "series")

    def __init__(self, label: str, kind: str = "counter") -> None:
        self.label = label
        self.kind = kind
        self.series: dict[str, Counter] = {}

    def __getitem__(self, value: str) -> Counter:
        counter = self.series.get(value)
        if counter is None:
            counter = self.series[value] = Counter()
        return counter


Metric = Counter | Gauge | Histogram | Labelled
M = TypeVar("M", Counter, Gauge, Histogram, Labelled)


class Metrics:
    """The registry. Asking twice for a name gives the same object; another kind is a ValueError."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[str, Metric]] = {}

    def counter(self, name: str, help: str) -> Counter:
        return self._get(name, help, Counter())

    def gauge(self, name: str, help: str) -> Gauge:
        return self._get(name, help, Gauge())

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._get(name, help, Histogram(buckets))

    def labelled(self, name: str, help: str, label: str, kind: str = "counter") -> Labelled:
        return self._get(name, help, Labelled(label, kind))

    def _get(self, name: str, help: str, fresh: M) -> M:
        known = self._metrics.setdefault(name, (help, fresh))[1]
        if not isinstance(known, type(fresh)):
            raise ValueError(f"metric {name} is a {type(known).__name__}")
        return known

    def render(self) -> str:
        """Prometheus text exposition, format 0.0.4."""
        lines: list[str] = []
        for name, (help, metric) in self._metrics.items():
            full = PREFIX + name
            lines.append(f"# HELP {full} {help}")
            if isinstance(metric, Histogram):
                lines.append(f"# TYPE {full} histogram")
                total = 0
                for bound, count in zip((*metric.bounds, "+Inf"), metric.counts, strict=True):
                    total += count
                    label = bound if isinstance(bound, str) else f"{bound:g}"
                    lines.append(f'{full}_bucket{{le="{label}"}} {total}')
                lines.append(f"{full}_sum {metric.sum:.15g}")
                lines.append(f"{full}_count {metric.count}")
            elif isinstance(metric, Labelled):
                lines.append(f"# TYPE {full} {metric.kind}")
                for value, counter in sorted(metric.series.items()):
                    lines.append(
                        f'{full}{{{metric.label}="{_escape(value)}"}} {counter.value:.15g}'
                    )
            else:
                kind = "counter" if isinstance(metric, Counter) else "gauge"
                lines.append(f"# TYPE {full} {kind}")
                lines.append(f"{full} {metric.value:.15g}")
        return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
