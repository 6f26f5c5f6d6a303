"""One step under construction: what the policy asks for is granted or denied, atomically."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from minisgl.base.types import I32, ReqState, Span
from minisgl.sched.blame import call
from minisgl.sched.policy import UNBOUNDED, Deny, Grant, ReqView
from minisgl.sched.request import Req
from minisgl.sched.rows import EMPTY, cdiv

if TYPE_CHECKING:
    from minisgl.sched.scheduler import Scheduler


class Builder:
    """The StepBuilder that a policy gets. Budgets, slots, pages and what is in flight are checked here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        self._limits = scheduler.limits
        self._res = scheduler.residency
        self._rows = scheduler.residency.rows
        self.begin()

    def begin(self) -> None:
        """Start a pass."""
        self.spans: list[tuple[Req, Span]] = []
        self._granted = 0
        self._decode = True

    @property
    def budget(self) -> int:
        """Tokens left in this step."""
        return self._limits.batch_tokens - self._granted - (self._rows.n_decode if self._decode else 0)

    def decode(self, on: bool = True) -> None:
        """Whether the decode rows take part; no effect if there is no budget left for them."""
        if not on:
            self._decode = False
        elif not self._decode and self.budget >= self._rows.n_decode:
            self._decode = True

    def prefill(self, r: ReqView, max_tokens: int = UNBOUNDED, reserve: float = 0.0) -> Grant:
        req = self._s.find(r)
        if req is None or req.state not in (ReqState.WAITING, ReqState.PREFILL):
            return Grant(deny=Deny.BUSY)
        fresh = req.state is ReqState.WAITING
        if not fresh and self._rows.last[req.row] == self._s.step:
            return Grant(deny=Deny.TWICE)
        most = min(self.budget, max_tokens)
        if most <= 0:
            return Grant(deny=Deny.BUDGET)
        deny = self._admit(req, most, reserve) if fresh else self._continue(req, most)
        return Grant(deny=deny) if deny is not None else self._grant(req, most)

    def preempt(self, r: ReqView) -> bool:
        req = self._s.find(r)
        if req is None or req.slot is None or self._rows.last[req.slot] > self._s.done_step:
            return False
        if req.state is not ReqState.PREFILL and not self._rows.decodes(req.slot):
            return False
        self._s.requeue(req)
        return True

    def decode_rows(self) -> I32:
        """Slots that decode in this step, with a page for their next token; none if there are not enough pages."""
        rows = self._rows
        if not self._decode or not rows.n_decode or not self._pages_for_decode():
            return EMPTY
        slots = rows.decoding.copy()
        rows.kv[slots] += 1
        rows.last[slots] = self._s.step
        return slots

    # ------------------------------------------------------------------------------------------------------ prefill

    def _admit(self, r: Req, most: int, reserve: float) -> Deny | None:
        """Give waiting ``r`` a row and pages for its first chunk. All its known tokens must fit beside what runs, so that
        prompts in prefill cannot block one another."""
        if not self._rows.free_slots:
            return Deny.SLOTS
        if self._s.sharing.blocked(r):
            return Deny.SHARED
        target = len(r.ids) + ceil((r.left - 1) * reserve)
        need = cdiv(target, self._limits.page_size) + self._rows.owed_pages(reserve)
        if need - self._res.matched(r) > self._res.ledger.room:
            return Deny.PAGES
        lease = self._res.lease(r)  # pins what was evictable, so the room may be less now
        pages = None
        if need - lease.n_pages <= self._res.ledger.room:
            pages = self._res.ledger.take(
                self._chunk_pages(r, lease.n_pages * self._limits.page_size, lease.n_pages, most)
            )
        if pages is None:
            self._res.release(lease)
            return Deny.PAGES
        self._res.open(r, lease, pages)
        self._s.admitted(r)
        return None

    def _continue(self, r: Req, most: int) -> Deny | None:
        pages = self._res.ledger.take(self._chunk_pages(r, r.kv_len, int(self._rows.n_pages[r.row]), most))
        if pages is None:
            return Deny.PAGES
        self._res.extend(r, pages)
        return None

    def _chunk_pages(self, r: Req, at: int, have: int, most: int) -> int:
        """Pages that the chunk of up to ``most`` tokens from ``at`` on needs beyond the ``have`` of the row."""
        return cdiv(min(at + most, len(r.ids)), self._limits.page_size) - have

    def _grant(self, r: Req, most: int) -> Grant:
        rows, slot = self._rows, r.row
        n = min(most, len(r.ids) - r.kv_len)
        rows.kv[slot] += n
        rows.last[slot] = self._s.step
        self._granted += n
        done = r.kv_len == len(r.ids)
        score = r.scores
        r.scored += n if score else 0
        self.spans.append((r, Span(slot, n, done, score)))
        return Grant(n, done)

    # ------------------------------------------------------------------------------------------------------- decode

    def _pages_for_decode(self) -> bool:
        """Give each decode row the page its next token needs; preempt rows, as the policy says, if there are too few."""
        rows, ledger = self._rows, self._res.ledger
        while len(slots := rows.starving()):
            counts = rows.wanted_pages(slots)
            pages = ledger.take(int(counts.sum()))
            if pages is None:
                counts = np.ones(len(slots), np.int32)
                pages = ledger.take(len(slots))
            if pages is not None:
                rows.grow(slots, counts, pages)
                return True
            if self._s.in_flight and ledger.room + ledger.held >= len(slots):
                return False  # enough come back with the step in flight
            victim = call(self._s.policy.victim, self._s.view)
            if victim is None or not self.preempt(victim):
                return False  # all is in flight: again after the next commit
        return True
