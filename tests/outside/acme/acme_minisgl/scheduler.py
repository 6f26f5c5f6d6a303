"""Shortest prompt first."""

from __future__ import annotations

from pydantic import Field

from minisgl.api import Deny, PluginSettings, ReqState, ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder


class ShortestFirstScheduler(SchedulerPolicy):
    """Waiting requests with the least to compute go first; who has waited too long goes before all others."""

    class Settings(PluginSettings):
        patience: int = Field(64, ge=1, description="steps after which a waiting request goes before shorter ones")

    def __init__(self, ctx: SchedContext) -> None:
        self._patience: int = ctx.settings.patience
        self._clock = ctx.clock
        self._since: dict[int, int] = {}  # uid -> step of arrival

    def arrived(self, r: ReqView) -> None:
        self._since[r.uid] = self._clock()

    def changed(self, r: ReqView, old: ReqState) -> None:
        if r.state is ReqState.DONE:
            del self._since[r.uid]

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            if not b.prefill(r):
                return
        for r in sorted(v.waiting(), key=lambda r: self._place(v, r)):
            grant = b.prefill(r)
            if not grant and grant.deny is not Deny.SHARED:
                return

    def _place(self, v: SchedView, r: ReqView) -> tuple[int, int, int]:
        if v.step - self._since[r.uid] > self._patience:
            return 0, 0, r.arrived
        return 1, len(r.ids) - v.cached(r), r.arrived
