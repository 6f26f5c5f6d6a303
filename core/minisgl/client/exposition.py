"""The text of /metrics, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from minisgl.base.types import EngineInfo
from minisgl.observe.catalog import ENGINE_COUNTERS, METRICS, NOT_VLLM, VLLM_NAMES
from minisgl.observe.engine import KEY
from minisgl.observe.meter import Histogram, Labels, Meter

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PREFIX, VLLM_PREFIX = "minisgl_", "vllm:"
ENGINE = "0"  # this version has one engine


def add_engine(
    meter: Meter, gauges: dict[str, dict[Labels, float]], stats: Mapping[str, Any], info: EngineInfo
) -> None:
    """Put what the engine says of itself into ``meter`` and ``gauges``. ``stats``: the answer of its operation "stats"."""
    meter.add(stats.get(KEY, {}))
    for name, count in ENGINE_COUNTERS.items():
        meter.counter(name).add(stats.get(count, 0))
    gauges["num_requests_running"] = {(): stats.get("running", 0)}
    gauges["num_requests_waiting"] = {(): stats.get("waiting", 0)}
    unused = stats.get("free", 0) + stats.get("evictable", 0)
    gauges["kv_cache_usage_perc"] = {(): max(0.0, 1 - unused / info.num_pages) if unused else 0.0}
    gauges["cache_config_info"] = {(str(info.page_size), str(info.num_pages), info.dtype): 1}


def exposition(meter: Meter, gauges: Mapping[str, Mapping[Labels, float]], model: str, vllm: bool) -> bytes:
    """All metrics that have a value. ``model``: the served name, "" while there is none. ``vllm``: also under its names."""

    class Collector:
        def collect(self) -> Iterator[Family]:
            values = _by_name(meter, gauges)
            for name in METRICS:
                if name in values:
                    yield _family(PREFIX + name, name, values[name], model)
            for name in METRICS if vllm else ():
                if name in values and name not in NOT_VLLM:
                    for theirs in VLLM_NAMES.get(name, (name,)):
                        yield _family(VLLM_PREFIX + theirs, name, values[name], model)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    text: bytes = generate_latest(registry)
    return text


def _by_name(meter: Meter, gauges: Mapping[str, Mapping[Labels, float]]) -> dict[str, dict[Labels, float | Histogram]]:
    found: dict[str, dict[Labels, float | Histogram]] = {}
    for name, labels, counter in meter.counters:
        found.setdefault(name, {})[labels] = counter.value
    for name, labels, histogram in meter.histograms:
        found.setdefault(name, {})[labels] = histogram
    for name, values in gauges.items():
        found.setdefault(name, {}).update(values)
    return found


def _family(shown: str, name: str, values: Mapping[Labels, float | Histogram], model: str) -> Family:
    metric = METRICS[name]
    names = [*(("model_name", "engine") if metric.of_model else ()), *metric.labels]
    own = (model, ENGINE) if metric.of_model else ()
    family: Any = _FAMILIES[metric.kind](shown, metric.doc, labels=names)
    for labels, value in values.items():
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = [[b, n] for b, n in zip(bounds, accumulate(value.counts), strict=True)]
            family.add_metric([*own, *labels], buckets=buckets, sum_value=value.sum)
        else:
            family.add_metric([*own, *labels], value)
    made: Family = family
    return made


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
