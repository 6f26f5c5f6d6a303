"""What the engine process measures for /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.observe import Observer, ObserverContext, RequestEvent, StepStats
from minisgl.observe.meter import Meter

KEY = "metrics"  # of the snapshot, in the engine's stats


@dataclass(slots=True)
class _Times:
    """Monotonic nanoseconds; 0: not yet."""

    admitted: int
    scheduled: int = 0
    first_token: int = 0


class EngineMetrics(Observer):
    """Times of requests by phase, and the size of steps."""

    def __init__(self) -> None:
        super().__init__(ObserverContext(None, "engine"))
        self.meter = Meter()
        self._open: dict[int, _Times] = {}
        self._step_tokens = self.meter.histogram("iteration_tokens")
        self._queue = self.meter.histogram("request_queue_time_seconds")
        self._prefill = self.meter.histogram("request_prefill_time_seconds")
        self._decode = self.meter.histogram("request_decode_time_seconds")
        self._inference = self.meter.histogram("request_inference_time_seconds")

    def step(self, s: StepStats) -> None:
        self._step_tokens.observe(s.n_decode + s.prefill_tokens)

    def request(self, e: RequestEvent) -> None:
        if e.event == "admitted":
            self._open[e.uid] = _Times(e.at_ns)
            return
        times = self._open.get(e.uid)
        if times is None:
            return
        if e.event == "scheduled":
            times.scheduled = times.scheduled or e.at_ns  # again after a preemption
        elif e.event == "first_token":
            times.first_token = e.at_ns
        else:
            del self._open[e.uid]
            self._ended(times, e.at_ns)

    def _ended(self, t: _Times, at_ns: int) -> None:
        if t.scheduled:
            self._queue.observe((t.scheduled - t.admitted) / 1e9)
            self._inference.observe((at_ns - t.scheduled) / 1e9)
        if t.first_token:
            self._prefill.observe((t.first_token - t.scheduled) / 1e9)
            self._decode.observe((at_ns - t.first_token) / 1e9)

    def snapshot(self) -> Mapping[str, Any]:
        return {KEY: self.meter.snapshot()}
