"""Fair share: of equal priority, the request of the user with the fewest served tokens goes first.

The idea is the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, 2024).
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

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

REMEMBERED = 4096  # counters above which those of users without requests are forgotten


class FairScheduler(SchedulerPolicy):
    """Chunked prefill that shares by the requests' ``key``.

    A key is charged the prompt and the whole possible output of a request when that gets a row, and given back what it did
    not use. Who comes (back) starts no lower than the least served of those who are there: absence earns nothing.
    """

    class Settings(PluginSettings):
        reserve: float = Field(
            1.0, gt=0, le=1, description="share of the outstanding output that must fit when a request is admitted"
        )
        max_chunk: int | None = Field(None, ge=1, description="most prompt tokens of one request in one step")

    def __init__(self, ctx: SchedContext) -> None:
        self._reserve: float = ctx.settings.reserve
        self._chunk: int = ctx.settings.max_chunk or UNBOUNDED
        self._queues: dict[str, WaitingQueue] = {}  # of keys with waiting requests
        self._served: dict[str, int] = {}  # tokens
        self._open: Counter[str] = Counter()  # requests that have not ended
        self._charged: dict[int, int] = {}  # uid -> tokens

    def arrived(self, r: ReqView) -> None:
        if not self._open[r.key]:
            least = min((self._served[key] for key in self._open if key != r.key), default=0)
            self._served[r.key] = max(self._served.get(r.key, 0), least)
        self._open[r.key] += 1
        self._queues.setdefault(r.key, WaitingQueue()).add(r)

    def changed(self, r: ReqView, old: ReqState) -> None:
        queue = self._queues.setdefault(r.key, WaitingQueue())
        queue.changed(r, old)
        if not len(queue):
            del self._queues[r.key]
        if r.state is ReqState.PREFILL:
            self._charged[r.uid] = r.prompt_len + r.max_new
            self._served[r.key] += self._charged[r.uid]
        elif r.state is ReqState.WAITING:
            self._served[r.key] -= self._charged.pop(r.uid)
        elif r.state is ReqState.DONE:
            self._ended(r)

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        for r in v.prefilling():
            if not b.prefill(r, self._chunk):
                return
        heap = [self._entry(key, 0) for key in self._queues]  # the next request of each key
        heapify(heap)
        while heap:
            *_, key, at = heappop(heap)
            grant = b.prefill(self._queues[key][at], self._chunk, self._reserve)
            if not grant and grant.deny is not Deny.SHARED:
                return
            at += not grant  # a granted one has left the queue
            if key in self._queues and at < len(self._queues[key]):
                heappush(heap, self._entry(key, at))

    def _entry(self, key: str, at: int) -> tuple[int, int, int, str, int]:
        r = self._queues[key][at]
        return -r.priority, self._served[key], r.arrived, key, at

    def _ended(self, r: ReqView) -> None:
        if (charged := self._charged.pop(r.uid, None)) is not None:
            self._served[r.key] += r.prompt_len + r.emitted - charged
        self._open[r.key] -= 1
        if not self._open[r.key]:
            del self._open[r.key]
        if len(self._served) > REMEMBERED + len(self._open):
            self._served = {key: n for key, n in self._served.items() if key in self._open}
