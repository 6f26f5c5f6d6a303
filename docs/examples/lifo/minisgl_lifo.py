"""A scheduler: the newest request goes first, but none waits for ever."""

from __future__ import annotations

from pydantic import Field

from minisgl.api import Deny, PluginSettings, ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder


class LifoScheduler(SchedulerPolicy):
    """Newest first; a request that has seen ``patience`` later ones arrive goes before them."""

    class Settings(PluginSettings):
        patience: int = Field(32, ge=1, description="later arrivals after which a request goes first")

    def __init__(self, ctx: SchedContext) -> None:
        self.patience: int = ctx.settings.patience
        self.newest = 0

    def arrived(self, r: ReqView) -> None:
        self.newest = r.arrived

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():  # finish the prompts that were begun
            if not b.prefill(r):
                return
        for r in sorted(v.waiting(), key=self.place):
            grant = b.prefill(r)
            if not grant and grant.deny is not Deny.SHARED:
                return

    def place(self, r: ReqView) -> tuple[bool, int]:
        patient = self.newest - r.arrived <= self.patience
        return patient, -r.arrived if patient else r.arrived
