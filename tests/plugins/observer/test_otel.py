"""The observer otel: what a collector receives, read with the protocol's own messages."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from minisgl.base.errors import EXIT_CONFIG, ConfigError
from minisgl.observe import Observer, ObserverContext, RequestEvent
from minisgl.plugin.registry import Registry

S = 1_000_000_000


class Collector(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def spans(self) -> list[Any]:
        found = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [s for request in found for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make(**settings: Any) -> Observer:
    registry = Registry.scan(bundled_only=True)
    made: Observer = registry.create("observer", "otel", settings, lambda s: ObserverContext(s, "engine"))
    return made


def plain(span: Any) -> dict[str, Any]:
    def value(v: Any) -> Any:
        kind = v.WhichOneof("value")
        return [value(item) for item in v.array_value.values] if kind == "array_value" else getattr(v, kind)

    return {a.key: value(a.value) for a in span.attributes}


def test_a_request_is_a_span_with_its_phases(collector: Collector) -> None:
    observer = make(endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces", service_name="mine")
    for event, at, more in (
        ("admitted", 10, {"prompt_tokens": 7}),
        ("scheduled", 11, {}),
        ("first_token", 13, {}),
        ("scheduled", 14, {}),  # again after a preemption
        ("ended", 16, {"prompt_tokens": 7, "cached_tokens": 4, "output_tokens": 5, "finish": "stop"}),
    ):
        observer.request(RequestEvent(3, event, at * S, **more))
    observer.close()
    (span,) = collector.spans
    assert span.name == "llm_request"
    assert span.end_time_unix_nano - span.start_time_unix_nano == 6 * S
    assert [(e.name, e.time_unix_nano - span.start_time_unix_nano) for e in span.events] == [
        ("scheduled", 1 * S),
        ("first_token", 3 * S),
        ("scheduled", 4 * S),
    ]
    assert plain(span) == {
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.e2e": 6.0,
        "minisgl.cached_tokens": 4,
        "minisgl.uid": 3,
    }
    (request,) = [ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    assert plain(request.resource_spans[0].resource)["service.name"] == "mine"


def test_requests_are_kept_apart_and_sample_zero_sends_nothing(collector: Collector) -> None:
    where = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    for sample, count in ((1.0, 2), (0.0, 2)):
        observer = make(endpoint=where, sample=sample)
        for uid in (1, 2, 3):
            observer.request(RequestEvent(uid, "admitted", uid * S, prompt_tokens=uid))
        observer.request(RequestEvent(4, "refused", 4 * S))
        for uid in (2, 1):
            observer.request(RequestEvent(uid, "ended", 9 * S, finish="abort"))
        observer.close()
        ended = {plain(s)["minisgl.uid"]: s.end_time_unix_nano - s.start_time_unix_nano for s in collector.spans}
        assert ended == {1: 8 * S, 2: 7 * S}
        assert len(collector.spans) == count


def test_without_its_packages_it_is_refused_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        ConfigError, match=r"observer 'otel' needs packages .*: pip install 'minisgl\[otel\]'"
    ) as caught:
        make()
    assert caught.value.exit_code == EXIT_CONFIG
