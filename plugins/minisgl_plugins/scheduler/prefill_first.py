"""Prefill before decode, never both in one step: the order of Mini-SGLang's scheduler (python/minisgl/scheduler)."""

from __future__ import annotations

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


class PrefillFirstScheduler(SchedulerPolicy):
    """New prompts are answered soonest; running rows pause for them. Waiting ones go by priority and arrival."""

    class Settings(PluginSettings):
        reserve: float = Field(
            1.0, gt=0, le=1, description="share of the outstanding output that must fit when a request is admitted"
        )
        max_chunk: int | None = Field(None, ge=1, description="most prompt tokens of one request in one step")

    def __init__(self, ctx: SchedContext) -> None:
        self._reserve: float = ctx.settings.reserve
        self._chunk: int = ctx.settings.max_chunk or UNBOUNDED
        self._queue = WaitingQueue()

    def arrived(self, r: ReqView) -> None:
        self._queue.add(r)

    def changed(self, r: ReqView, old: ReqState) -> None:
        self._queue.changed(r, old)

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        b.decode(False)
        whole = b.budget
        self._prefill(v, b)
        if b.budget == whole:
            b.decode(True)

    def _prefill(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            if not b.prefill(r, self._chunk):
                return
        for r in self._queue:
            grant = b.prefill(r, self._chunk, self._reserve)
            if not grant and grant.deny is not Deny.SHARED:
                return
