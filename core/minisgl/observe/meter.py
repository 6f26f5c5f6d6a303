"""Counters and histograms of one process. One thread writes; a snapshot is plain JSON, and those of processes add up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl.observe.catalog import METRICS

Labels = tuple[str, ...]
Snapshot = Mapping[str, Any]  # {"counters": [[name, labels, value]], "histograms": [[name, labels, counts, sum]]}


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """``counts``: of values up to each bound, and beyond the last; not cumulated."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Meter:
    """Metrics of the catalog by name and label values; each is made when it is first asked for. Keep what is used often."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], Counter] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        found = self._counters.get((name, labels))
        if found is None:
            _check(name, "counter", labels)
            found = self._counters[name, labels] = Counter()
        return found

    def histogram(self, name: str, *labels: str) -> Histogram:
        found = self._histograms.get((name, labels))
        if found is None:
            _check(name, "histogram", labels)
            found = self._histograms[name, labels] = Histogram(METRICS[name].buckets)
        return found

    def snapshot(self) -> dict[str, Any]:
        return {
            "counters": [[name, list(labels), c.value] for (name, labels), c in self._counters.items()],
            "histograms": [[name, list(labels), h.counts, h.sum] for (name, labels), h in self._histograms.items()],
        }

    def add(self, snapshot: Snapshot) -> None:
        """Add what another process measured. Raises: KeyError, ValueError for metrics that the catalog does not have."""
        for name, labels, value in snapshot.get("counters", ()):
            self.counter(name, *labels).add(value)
        for name, labels, counts, total in snapshot.get("histograms", ()):
            mine = self.histogram(name, *labels)
            mine.counts = [a + b for a, b in zip(mine.counts, counts, strict=True)]
            mine.sum += total

    @property
    def counters(self) -> Iterable[tuple[str, Labels, Counter]]:
        return [(name, labels, c) for (name, labels), c in self._counters.items()]

    @property
    def histograms(self) -> Iterable[tuple[str, Labels, Histogram]]:
        return [(name, labels, h) for (name, labels), h in self._histograms.items()]


def _check(name: str, kind: str, labels: Labels) -> None:
    metric = METRICS.get(name)
    if metric is None or metric.kind != kind or len(metric.labels) != len(labels):
        raise ValueError(f"there is no {kind} {name!r} with {len(labels)} labels; minisgl.observe.catalog has all")
