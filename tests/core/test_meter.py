"""Counters and histograms: bounds, sums over processes, the text that Prometheus reads."""

from __future__ import annotations

import json
import time
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from minisgl.client.exposition import exposition
from minisgl.observe import RequestEvent, StepStats
from minisgl.observe.catalog import METRICS
from minisgl.observe.engine import EngineMetrics
from minisgl.observe.meter import Meter

NAME = "time_to_first_token_seconds"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 3000), max_size=40), st.integers(1, 5))
def test_processes_add_up_to_one_histogram(values: list[float], processes: int) -> None:
    meters = [Meter() for _ in range(processes)]
    for i, value in enumerate(values):
        meters[i % processes].histogram(NAME).observe(value)
    total = Meter()
    for meter in meters:
        total.add(json.loads(json.dumps(meter.snapshot())))  # as it travels
    text = exposition(total, {}, "m", vllm=False).decode()
    found = {(s.name, s.labels.get("le")): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    if not values:
        return
    ordered = sorted(values)
    for bound in METRICS[NAME].buckets:  # cumulative, the bound itself included
        (shown,) = [
            v for (n, le), v in found.items() if n.endswith("_bucket") and le != "+Inf" and float(le or 0) == bound
        ]
        assert shown == bisect_right(ordered, bound)
    assert found[f"minisgl_{NAME}_count", None] == len(values)
    assert found[f"minisgl_{NAME}_sum", None] == pytest.approx(sum(values))


def test_what_the_catalog_does_not_have_is_refused() -> None:
    for name, labels in (("nope", ()), (NAME, ()), ("request_success", ()), ("prompt_tokens", ("x",))):
        with pytest.raises(ValueError, match=f"no counter '{name}'"):
            Meter().counter(name, *labels)
    with pytest.raises(ValueError, match="no histogram 'nope'"):
        Meter().add({"histograms": [["nope", [], [1], 1.0]]})


def test_labels_are_escaped() -> None:
    meter = Meter()
    meter.counter("request_rejected", 'a"b\\c\nd').add()
    (family,) = text_string_to_metric_families(exposition(meter, {}, "m", vllm=True).decode())
    assert family.samples[0].labels == {"code": 'a"b\\c\nd'}


def test_a_page_with_everything_on_it_is_written_within_ten_milliseconds() -> None:
    """In CPU time, of the fastest of several."""
    meter = Meter()
    for name, metric in METRICS.items():
        labels = ["x"] * len(metric.labels)
        if metric.kind == "histogram":
            meter.histogram(name, *labels).observe(0.1)
        elif metric.kind == "counter":
            meter.counter(name, *labels).add()
    took = []
    for _ in range(5):
        start = time.process_time()
        exposition(meter, {"num_requests_running": {(): 1}}, "m", vllm=False)
        took.append(time.process_time() - start)
    assert min(took) < 0.01


def test_the_engine_measures_phases_of_requests_and_sizes_of_steps() -> None:
    metrics = EngineMetrics()
    for event, seconds in (("admitted", 10), ("scheduled", 12), ("first_token", 15), ("scheduled", 16), ("ended", 22)):
        metrics.request(RequestEvent(1, event, seconds * 10**9))
    metrics.request(RequestEvent(2, "admitted", 10 * 10**9))
    metrics.request(RequestEvent(2, "ended", 11 * 10**9))  # gone while it waited
    metrics.request(RequestEvent(3, "refused", 11 * 10**9))
    metrics.step(StepStats(0, 5, 1, 40, 0, 6, 0, 0, 0, 0, 0))
    sums = {name: (sum(counts), total) for name, _, counts, total in metrics.snapshot()["metrics"]["histograms"]}
    assert sums == {
        "request_queue_time_seconds": (1, 2.0),
        "request_prefill_time_seconds": (1, 3.0),
        "request_decode_time_seconds": (1, 7.0),
        "request_inference_time_seconds": (1, 10.0),
        "iteration_tokens": (1, 45.0),
    }
