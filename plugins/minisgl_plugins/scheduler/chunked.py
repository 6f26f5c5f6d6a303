"""Chunked prefill: in every step all rows decode, and what is left of the token budget goes to prompts.

The idea is that of Sarathi-Serve (Agrawal et al., 2024).
"""

from __future__ import annotations

from bisect import bisect_left, insort

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

Place = tuple[int, int]  # (-priority, arrived)


class ChunkedScheduler(SchedulerPolicy):
    """Prompts begun earlier go first, then waiting ones by priority and arrival; none overtakes one that lacks pages."""

    class Settings(PluginSettings):
        reserve: float = Field(
            1.0, gt=0, le=1, description="share of the outstanding output that must fit when a request is admitted"
        )
        max_chunk: int | None = Field(None, ge=1, description="most prompt tokens of one request in one step")

    def __init__(self, ctx: SchedContext) -> None:
        self._reserve: float = ctx.settings.reserve
        self._chunk: int = ctx.settings.max_chunk or UNBOUNDED
        self._order: list[Place] = []  # of waiting requests, sorted
        self._waiting: dict[Place, ReqView] = {}

    def arrived(self, r: ReqView) -> None:
        self._enter(r)

    def changed(self, r: ReqView, old: ReqState) -> None:
        if old is ReqState.WAITING:
            place = _place(r)
            del self._waiting[place]
            del self._order[bisect_left(self._order, place)]
        elif r.state is ReqState.WAITING:
            self._enter(r)

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            if not b.prefill(r, self._chunk):
                return
        for place in self._order.copy():
            grant = b.prefill(self._waiting[place], self._chunk, self._reserve)
            if not grant and grant.deny is not Deny.SHARED:
                return

    def _enter(self, r: ReqView) -> None:
        place = _place(r)
        self._waiting[place] = r
        insort(self._order, place)


def _place(r: ReqView) -> Place:
    return -r.priority, r.arrived
