"""Longest cached prefix first: requests that reuse what is cached run before it is given up.

The idea is RadixAttention's cache-aware scheduling (Zheng et al., SGLang, 2024).
"""

from __future__ import annotations

from itertools import islice

from pydantic import Field

from minisgl.api import (
    UNBOUNDED,
    Deny,
    PluginSettings,
    ReqState,
    ReqView,
    SchedContext,
    SchedulerPolicy,
    SchedView,
    StepBuilder,
)

from .queue import WaitingQueue


class LongestPrefixScheduler(SchedulerPolicy):
    """Chunked prefill whose waiting requests go by priority, then cached tokens. One that waits for ``max_wait`` steps goes
    first in its priority, and from then on nothing of that priority overtakes it."""

    class Settings(PluginSettings):
        reserve: float = Field(
            1.0, gt=0, le=1, description="share of the outstanding output that must fit when a request is admitted"
        )
        max_chunk: int | None = Field(None, ge=1, description="most prompt tokens of one request in one step")
        max_wait: int = Field(256, ge=0, description="steps that a request may be overtaken")
        window: int = Field(32, ge=1, description="waiting requests compared at a time; it bounds the cost of a step")

    def __init__(self, ctx: SchedContext) -> None:
        self._settings = ctx.settings
        self._chunk: int = ctx.settings.max_chunk or UNBOUNDED
        self._clock = ctx.clock
        self._queue = WaitingQueue()
        self._since: dict[int, int] = {}  # uid -> step of its arrival

    def arrived(self, r: ReqView) -> None:
        self._queue.add(r)
        self._since[r.uid] = self._clock()

    def changed(self, r: ReqView, old: ReqState) -> None:
        self._queue.changed(r, old)
        if r.state is ReqState.DONE:
            del self._since[r.uid]

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            if not b.prefill(r, self._chunk):
                return
        waiting, granted = iter(self._queue), True
        while granted and v.free_slots:
            granted = False
            for r in sorted(islice(waiting, self._settings.window), key=lambda r: self._rank(v, r)):
                grant = b.prefill(r, self._chunk, self._settings.reserve)
                if not grant and grant.deny is not Deny.SHARED:
                    return
                granted |= bool(grant)

    def _rank(self, v: SchedView, r: ReqView) -> tuple[int, bool, int, int]:
        old = v.step - self._since[r.uid] >= self._settings.max_wait
        return -r.priority, not old, 0 if old else -v.cached(r), r.arrived
