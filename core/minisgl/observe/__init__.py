"""What observers see: steps and requests. Torch-free; called outside the step's critical part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.base.component import Component


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Times in nanoseconds; ``rows`` = decode rows + spans; ``schedule_ns`` includes admission and the policy;
    ``run_ns`` from submit to collected."""

    step: int
    n_decode: int
    n_spans: int
    prefill_tokens: int
    n_waiting: int
    n_running: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    schedule_ns: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """``event``: "admitted", "scheduled" (its first step is submitted; again after a preemption), "first_token", "ended" or
    "refused". ``at_ns``: monotonic clock."""

    uid: int
    event: str
    at_ns: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""


@dataclass(frozen=True, slots=True)
class ObserverContext:
    settings: Any
    role: str


class Observer(Component):
    """An exception is logged once with the observer's name, and that observer is off from then on."""

    def __init__(self, ctx: ObserverContext) -> None:
        self.settings = ctx.settings

    def step(self, s: StepStats) -> None:
        """After each step."""

    def request(self, e: RequestEvent) -> None:
        """On each event of a request."""

    def close(self) -> None:
        """The engine ends; called once, from the engine's thread."""

    def snapshot(self) -> Mapping[str, Any]:
        """Counters for /stats and metrics."""
        return {}
