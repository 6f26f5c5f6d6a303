"""What a scheduler policy sees of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from minisgl.base.types import Limits
from minisgl.sched.policy import ReqView

if TYPE_CHECKING:
    from minisgl.sched.scheduler import Scheduler


class View:
    """The SchedView of a Scheduler. Iterators run over a copy, so that a policy may ask the builder while it iterates."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler

    @property
    def step(self) -> int:
        return self._s.step

    @property
    def limits(self) -> Limits:
        return self._s.limits

    @property
    def free_pages(self) -> int:
        return self._s.residency.ledger.free

    @property
    def evictable_pages(self) -> int:
        return self._s.cache.stats().evictable

    @property
    def free_slots(self) -> int:
        return len(self._s.residency.rows.free_slots)

    @property
    def n_running(self) -> int:
        return self._s.n_running

    @property
    def n_decode(self) -> int:
        return self._s.n_decode

    @property
    def owed_tokens(self) -> int:
        return self._s.residency.rows.owed_tokens()

    def waiting(self) -> Iterator[ReqView]:
        return iter(list(self._s.waiting.values()))

    def prefilling(self) -> Iterator[ReqView]:
        return iter(list(self._s.prefilling.values()))

    def decoding(self) -> Iterator[ReqView]:
        return iter([self._s.by_slot[slot] for slot in self._s.residency.rows.decoding.tolist()])

    def cached(self, r: ReqView) -> int:
        req = self._s.find(r)
        return 0 if req is None else self._s.residency.matched(req) * self._s.limits.page_size
