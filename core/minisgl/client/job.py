"""What an api process knows of an open request, and what it measures of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from minisgl.base.types import Accepted, Delta, Refused
from minisgl.observe.meter import Meter


@dataclass(frozen=True, slots=True)
class Gone:
    """The engine, or the text worker of the request, has failed; ``text`` says how."""

    text: str


Item = Accepted | Delta | Refused | Gone


@dataclass(slots=True, eq=False)
class Job:
    """An open request. ``uids``: of its outputs, by index; ``running``: those that have not ended, uid -> index;
    ``delivered``: a Delta was handed out; ``submitted_s``: by the client's clock."""

    worker: int
    uids: tuple[int, ...]
    running: dict[int, int]
    submitted_s: float
    items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    accepted: bool = False
    delivered: bool = False
    prompt_tokens: int = 0
    outputs: dict[int, Output] = field(default_factory=dict)  # by index


@dataclass(slots=True)
class Output:
    """One of a job's outputs. Times by the client's clock; of its first and last token, 0 before."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class RequestMeters:
    """Requests as their clients see them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._prompt = meter.counter("prompt_tokens")
        self._cached = meter.counter("prompt_tokens_cached")
        self._generated = meter.counter("generation_tokens")
        self._ttft = meter.histogram("time_to_first_token_seconds")
        self._itl = meter.histogram("inter_token_latency_seconds")
        self._tpot = meter.histogram("request_time_per_output_token_seconds")
        self._e2e = meter.histogram("e2e_request_latency_seconds")
        self._prompt_size = meter.histogram("request_prompt_tokens")
        self._output_size = meter.histogram("request_generation_tokens")
        for reason in ("stop", "length", "abort", "error"):
            meter.counter("request_success", reason)

    def arrived(self, job: Job, delta: Delta, now: float) -> None:
        """A delta of ``job`` came from its text worker."""
        out = job.outputs.get(delta.index)
        if out is None:
            out = job.outputs[delta.index] = Output()
        n = len(delta.ids)
        if n:
            out.tokens += n
            self._generated.value += n
            if out.last_s:
                self._itl.observe((now - out.last_s) / n, n)
            else:
                out.first_s = now
                self._ttft.observe(now - job.submitted_s)
            out.last_s = now
        if delta.finish is not None:
            self._ended(job, out, delta, now)

    def _ended(self, job: Job, out: Output, last: Delta, now: float) -> None:
        self.finished(str(last.finish))
        self._e2e.observe(now - job.submitted_s)
        self._output_size.observe(out.tokens)
        if out.tokens > 1:
            self._tpot.observe((out.last_s - out.first_s) / (out.tokens - 1))
        if last.usage is not None:
            self._prompt.add(last.usage.prompt_tokens)
            self._cached.add(last.usage.cached_tokens)
            self._prompt_size.observe(last.usage.prompt_tokens)

    def finished(self, reason: str, outputs: int = 1) -> None:
        """Outputs ended. ``reason``: "stop", "length", "abort" or "error"."""
        self._meter.counter("request_success", reason).add(outputs)
