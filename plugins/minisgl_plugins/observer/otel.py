"""OpenTelemetry traces: a span for each request in the engine, sent to a collector over OTLP/HTTP."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from pydantic import Field

from minisgl.api import ConfigError, Observer, ObserverContext, PluginSettings, RequestEvent

SPAN = "llm_request"


class OTelSettings(PluginSettings):
    endpoint: str = Field(
        "http://localhost:4318/v1/traces", pattern=r"^https?://", description="where the collector takes OTLP over HTTP"
    )
    service_name: str = Field("minisgl", min_length=1, description="service.name of the spans")
    sample: float = Field(1.0, ge=0, le=1, description="share of requests that are traced")
    timeout_s: float = Field(5.0, gt=0, description="longest wait for the collector; spans it does not take are lost")


class OTelObserver(Observer):
    """Spans are sent in batches by a thread of the SDK, so that no step waits for the collector."""

    Settings = OTelSettings

    def __init__(self, ctx: ObserverContext) -> None:
        """Raises: ConfigError if the packages are not installed."""
        super().__init__(ctx)
        trace, sampling, export, resources, otlp = _packages()
        s: OTelSettings = ctx.settings
        self._provider = trace.TracerProvider(
            sampler=sampling.TraceIdRatioBased(s.sample),
            resource=resources.Resource.create({"service.name": s.service_name}),
            shutdown_on_exit=False,
        )
        exporter = otlp.OTLPSpanExporter(endpoint=s.endpoint, timeout=s.timeout_s)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("minisgl")
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # spans carry the time of day
        self._open: dict[int, Any] = {}  # uid -> span
        self._at: dict[int, dict[str, int]] = {}  # uid -> event -> monotonic ns

    def request(self, e: RequestEvent) -> None:
        if e.event == "admitted":
            span = self._tracer.start_span(SPAN, start_time=e.at_ns + self._epoch_ns)
            span.set_attribute("gen_ai.usage.input_tokens", e.prompt_tokens)
            span.set_attribute("minisgl.uid", e.uid)
            self._open[e.uid], self._at[e.uid] = span, {"admitted": e.at_ns}
        elif (span := self._open.get(e.uid)) is not None:
            if e.event == "ended":
                self._end(span, e)
            else:
                span.add_event(e.event, timestamp=e.at_ns + self._epoch_ns)
                self._at[e.uid].setdefault(e.event, e.at_ns)

    def _end(self, span: Any, e: RequestEvent) -> None:
        at = self._at.pop(e.uid)
        del self._open[e.uid]
        span.set_attribute("gen_ai.usage.output_tokens", e.output_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [e.finish])
        span.set_attribute("minisgl.cached_tokens", e.cached_tokens)
        for event, name in (("scheduled", "time_in_queue"), ("first_token", "time_to_first_token")):
            if event in at:
                span.set_attribute(f"gen_ai.latency.{name}", (at[event] - at["admitted"]) / 1e9)
        span.set_attribute("gen_ai.latency.e2e", (e.at_ns - at["admitted"]) / 1e9)
        span.end(end_time=e.at_ns + self._epoch_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _packages() -> list[Any]:
    names = ["sdk.trace", "sdk.trace.sampling", "sdk.trace.export", "sdk.resources"]
    names += ["exporter.otlp.proto.http.trace_exporter"]
    try:
        return [import_module(f"opentelemetry.{name}") for name in names]
    except ImportError as exc:
        raise ConfigError(
            f"observer 'otel' needs packages 'opentelemetry-sdk' and 'opentelemetry-exporter-otlp-proto-http' ({exc}): "
            "pip install 'minisgl[otel]'"
        ) from exc
