"""Chunked prefill: in every step all rows decode, and what is left of the token budget goes to prompts.

The idea is that of Sarathi-Serve (Agrawal et al., 2024).
"""

from __future__ import annotations

from typing import Literal

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

from .queue import Place, WaitingQueue, by_arrival


def by_length(r: ReqView) -> Place:
    """Higher priority first, then the longest remaining output, then who came first."""
    return -r.priority, -r.left, r.arrived


class ChunkedScheduler(SchedulerPolicy):
    """Prompts begun earlier go first, then waiting ones by priority and order; none overtakes one that lacks pages."""

    class Settings(PluginSettings):
        reserve: float = Field(
            1.0, gt=0, le=1, description="share of the outstanding output that must fit when a request is admitted"
        )
        max_chunk: int | None = Field(None, ge=1, description="most prompt tokens of one request in one step")
        order: Literal["fcfs", "longest"] = Field(
            "fcfs",
            description="among equal priorities: first come first served, or the longest remaining output first, for batches "
            "that are to end together (a short request waits while longer ones come). Batches of LLM.generate and bench offline "
            "that ignore EOS come longest first unless this is set",
        )
        tile_tokens: int | None = Field(
            None, ge=1, description="a step that prompts fill gets a multiple of this many tokens if the budget has one"
        )

    def __init__(self, ctx: SchedContext) -> None:
        self._reserve: float = ctx.settings.reserve
        self._chunk: int = ctx.settings.max_chunk or UNBOUNDED
        self._tile: int = ctx.settings.tile_tokens or 1
        self._queue = WaitingQueue(by_length if ctx.settings.order == "longest" else by_arrival)

    def arrived(self, r: ReqView) -> None:
        self._queue.add(r)

    def changed(self, r: ReqView, old: ReqState) -> None:
        self._queue.changed(r, old)

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        left = self._tokens(v.n_decode, b.budget)
        for r in v.prefilling():
            grant = b.prefill(r, min(self._chunk, left))
            if not grant:
                return
            left -= grant.tokens
        for r in self._queue:
            grant = b.prefill(r, min(self._chunk, left), self._reserve)
            if not grant and grant.deny is not Deny.SHARED:
                return
            left -= grant.tokens

    def _tokens(self, n_decode: int, budget: int) -> int:
        """Prompt tokens for this step beside ``n_decode`` others."""
        over = (n_decode + budget) % self._tile
        return budget - over if over < budget else budget
