"""The scheduler: life of requests, one plan per step, one commit per result. Policies decide; this owns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from minisgl.base.errors import ConfigError
from minisgl.base.types import (
    I32,
    I64,
    Admit,
    Ended,
    EngineOutput,
    Finish,
    Limits,
    LogprobBlock,
    Refused,
    ReqState,
    Scores,
    StepPlan,
    StepResult,
    Tokens,
)
from minisgl.sched import audit
from minisgl.sched.blame import call
from minisgl.sched.builder import Builder
from minisgl.sched.cache import CachePolicy
from minisgl.sched.policy import ReqView, SchedulerPolicy
from minisgl.sched.request import Req
from minisgl.sched.residency import Residency
from minisgl.sched.sharing import PromptSharing
from minisgl.sched.view import View

STALL_PASSES = 2


class Scheduler:
    """One brain for the device. Not thread-safe: the engine thread calls it.

    ``step``: the next to plan; ``done_step``: the last committed. Plans and commits are gap-free and in order. The end of
    a request is said at once and exactly once; its row is taken away when the last step that mentions it is committed.
    """

    def __init__(self, limits: Limits, cache: CachePolicy, policy: SchedulerPolicy) -> None:
        _check(limits)
        self.limits, self.cache, self.policy = limits, cache, policy
        self.step, self.done_step = 0, -1
        self.residency = Residency(limits, cache)
        self.sharing = PromptSharing(self.residency)
        self.reqs: dict[int, Req] = {}  # all, those that ended and still have a row included
        self.waiting: OrderedDict[int, Req] = OrderedDict()
        self.prefilling: OrderedDict[int, Req] = OrderedDict()
        self.by_slot: dict[int, Req] = {}
        self.view = View(self)
        self._rows = self.residency.rows
        self._builder = Builder(self)
        self._draining: list[Req] = []
        self._planned: dict[int, I32] = {}  # step in flight -> slots its result is of
        self._outputs: dict[int, list[EngineOutput]] = {}
        self._stalled = 0
        self._arrivals = 0
        self._totals = dict.fromkeys(("cached_tokens_total", "prompt_tokens_total", "preemptions"), 0)

    # --------------------------------------------------------------------------------------------------------- intake

    def admit(self, a: Admit) -> Refused | None:
        """Queue a request. Returns: why it can never run, and then nothing else will be said of it."""
        limits, n = self.limits, len(a.ids)
        room = min(limits.max_len, limits.num_pages * limits.page_size)
        if a.uid in self.reqs:
            return Refused(a.uid, 400, f"request {a.uid} is running already; a request id is used once")
        if n == 0:
            return Refused(a.uid, 400, "the prompt has no tokens; at least 1 is needed", "invalid_value", "prompt")
        if n >= room:
            what = f"the prompt has {n} tokens; this server takes at most {room - 1}"
            if room < limits.max_len:
                what += f" (its KV cache holds {room} tokens)"
            return Refused(a.uid, 400, what, "context_length_exceeded", "prompt")
        if a.sampling.max_new < 1:
            return Refused(a.uid, 400, f"max_new = {a.sampling.max_new}; at least 1 is needed", "invalid_value")
        ids = np.array(a.ids, np.int32)  # a copy: the caller's buffer may be reused
        ids.flags.writeable = False
        r = Req.of(a, ids, min(a.sampling.max_new, room - n), self._arrivals, self._rows)
        self._arrivals += 1
        self.reqs[a.uid] = self.waiting[a.uid] = r
        call(self.policy.arrived, r)
        return None

    def abort(self, uid: int) -> None:
        """End a request because nobody wants it; no effect if it is unknown or has ended."""
        if (r := self.reqs.get(uid)) is not None:
            self._finish(r, Finish.ABORT)

    def fail(self, uid: int, why: str) -> None:
        """End a request with an error; no effect if it is unknown or has ended."""
        if (r := self.reqs.get(uid)) is not None:
            self._finish(r, Finish.ERROR, why)

    # ----------------------------------------------------------------------------------------------------------- steps

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns: None if there is nothing to do before the next commit or arrival."""
        self._builder.begin()
        if self.waiting or self.prefilling:
            call(self.policy.plan, self.view, self._builder)
        slots = self._builder.decode_rows()
        spans = self._builder.spans
        if not spans and not len(slots):
            self._watch_stall()
            return None
        self._stalled = 0
        plan = self._rows.emit(self.step, len(slots), [span for _, span in spans])
        sampled = [r for r, span in spans if span.sample]
        self._planned[self.step] = np.concatenate([slots, np.array([r.row for r in sampled], np.int32)])
        for slot in slots[self._rows.kv[slots] == self._rows.end[slots]].tolist():
            self._rows.leave(slot)  # its last token is planned
        for r in sampled:
            self._prefilled(r)
        self.step += 1
        return plan

    def commit(self, res: StepResult) -> None:
        """Take in the tokens of the oldest step in flight; tokens of requests that have ended are dropped."""
        assert res.step == self.done_step + 1, f"result of step {res.step}, expected {self.done_step + 1}"
        slots = self._planned.pop(res.step)
        tokens, stop = res.tokens, res.stop
        assert len(tokens) == len(stop) == len(slots), f"{len(tokens)} tokens, {len(stop)} stops, {len(slots)} rows"
        self.done_step = res.step
        rows = self._rows
        if res.logprobs is not None:
            self._put_scores(res.logprobs)
        dead = rows.dead[slots]
        if dead.any():
            slots, tokens, stop = slots[~dead], tokens[~dead], stop[~dead]
        if len(slots):
            rows.tokens[slots, rows.prompt[slots] + rows.emitted[slots]] = tokens
            rows.emitted[slots] += 1
            self._put_tokens(res.step, slots, tokens)
            ended = stop | (rows.emitted[slots] >= rows.max_new[slots])
            for i in np.flatnonzero(ended).tolist():
                self._finish(self.by_slot[int(slots[i])], Finish.STOP if stop[i] else Finish.LENGTH)
        self._drain()

    def take_outputs(self) -> dict[int, list[EngineOutput]]:
        """What to tell each owner since the last call, in order."""
        out, self._outputs = self._outputs, {}
        return out

    # ----------------------------------------------------------------------------------------------------------- state

    @property
    def idle(self) -> bool:
        """No request at all, ended ones whose row is not taken away yet included."""
        return not self.reqs

    @property
    def in_flight(self) -> int:
        """Steps planned and not committed."""
        return self.step - 1 - self.done_step

    @property
    def n_waiting(self) -> int:
        return len(self.waiting)

    @property
    def n_running(self) -> int:
        """Requests that have a row and have not ended."""
        return len(self.by_slot) - len(self._draining)

    @property
    def n_decode(self) -> int:
        return self._rows.n_decode

    def counts(self) -> Mapping[str, int]:
        """Pages by owner, requests by state, and totals since the start."""
        ledger, stats = self.residency.ledger, self.cache.stats()
        pages = {"free": ledger.free, "held": ledger.held, "evictable": stats.evictable, "locked": stats.locked}
        running = {"waiting": self.n_waiting, "running": self.n_running, "prefilling": len(self.prefilling)}
        cache = {
            "cache_queries": stats.queries,
            "cache_hit_tokens": stats.hit_tokens,
            "cache_evicted_pages": stats.evicted_pages,
        }
        return pages | running | {"decoding": self.n_decode, "in_flight": self.in_flight} | self._totals | cache

    def audit(self) -> None:
        """Check every invariant of pages, rows and requests. Raises: AssertionError with both values."""
        audit.audit(self)

    def clear_cache(self) -> int:
        """Give up every cached page that no row uses. Returns: pages that became free."""
        return self.residency.ledger.clear_cache()

    # -------------------------------------------------------------------------------------- for the builder and the view

    def find(self, view: ReqView) -> Req | None:
        """The request behind what a policy passed; None if it is not one of this scheduler."""
        r = self.reqs.get(view.uid)
        return r if r is view else None

    def admitted(self, r: Req) -> None:
        """``r`` has a row now."""
        del self.waiting[r.uid]
        self.prefilling[r.uid] = self.by_slot[r.row] = r
        self.sharing.begin(r)
        if r.cached_tokens is None:
            r.cached_tokens = r.lease.n_pages * self.limits.page_size
            self._totals["cached_tokens_total"] += r.cached_tokens
            self._totals["prompt_tokens_total"] += r.prompt_len
        self._move(r, ReqState.PREFILL)

    def requeue(self, r: Req) -> None:
        """Preempt ``r``, which has no step in flight: it waits again, first of all, and knows what it has emitted."""
        slot = r.row
        ids: I32 = self._rows.tokens[slot, : r.prompt_len + r.emitted].copy()
        ids.flags.writeable = False
        self.prefilling.pop(r.uid, None)
        self.sharing.end(r)
        self._close(r, keep=r.planned)
        if r.scores:
            r.scored = 0  # from the start again: half a prompt's would need the other half's KV
        r.ids, r.planned, r.matched, r.checked = ids, False, None, -1
        self.waiting[r.uid] = r
        self.waiting.move_to_end(r.uid, last=False)
        self._totals["preemptions"] += 1
        self._move(r, ReqState.WAITING)

    # ----------------------------------------------------------------------------------------------------------- inside

    def _prefilled(self, r: Req) -> None:
        """The last chunk of ``r`` is in the plan just made. Its full pages go to the cache: steps run in order, so whoever
        leases them in a later step reads what this one wrote."""
        r.planned = True
        self.residency.insert(r, r.ids, fence=self.step)
        self.sharing.end(r)
        del self.prefilling[r.uid]
        if self._rows.kv[r.row] < self._rows.end[r.row]:
            self._rows.join(r.row)
        self._move(r, ReqState.DECODE)

    def _put_tokens(self, step: int, slots: I32, tokens: I32) -> None:
        uids: I64 = self._rows.uid[slots]
        owners = self._rows.owner[slots]
        first = int(owners[0])
        if (owners == first).all():
            self._put(first, Tokens(step, uids, tokens))
            return
        for owner in np.unique(owners).tolist():
            own = owners == owner
            self._put(owner, Tokens(step, uids[own], tokens[own]))

    def _put_scores(self, block: LogprobBlock) -> None:
        """Those of requests that have not ended, to their owners, before the tokens they are of."""
        rows = self._rows
        alive = ~rows.dead[block.row]
        for owner in np.unique(rows.owner[block.row[alive]]).tolist():
            own = block.take(alive & (rows.owner[block.row] == owner))
            slots, at = np.unique(own.row, return_inverse=True)
            self._put(owner, Scores(rows.uid[slots], replace(own, row=at.astype(np.int32))))

    def _put(self, owner: int, output: EngineOutput) -> None:
        self._outputs.setdefault(owner, []).append(output)

    def _finish(self, r: Req, why: Finish, detail: str = "") -> None:
        """End ``r`` once; its row goes when its last step is done."""
        if r.finish is not None:
            return
        r.finish = why
        self._put(r.owner, Ended(r.uid, why, r.prompt_len, r.emitted, r.cached_tokens or 0, detail))
        self.waiting.pop(r.uid, None)
        self.prefilling.pop(r.uid, None)
        self.sharing.end(r)
        if r.slot is None:
            del self.reqs[r.uid]
        else:
            self._rows.end_row(r.slot)
            self._draining.append(r)
        self._move(r, ReqState.DONE)
        self._drain()

    def _drain(self) -> None:
        """Take away the rows of ended requests that no step in flight mentions."""
        self.residency.ledger.retire(self.done_step)
        if not self._draining:
            return
        last = self._rows.last
        ready = [r for r in self._draining if last[r.row] <= self.done_step]
        self._draining = [r for r in self._draining if last[r.row] > self.done_step]
        for r in ready:
            self._close(r, keep=r.finish in (Finish.STOP, Finish.LENGTH))
            del self.reqs[r.uid]

    def _close(self, r: Req, keep: bool) -> None:
        del self.by_slot[r.row]
        self.residency.close(r, keep)

    def _move(self, r: Req, state: ReqState) -> None:
        old, r.state = r.state, state
        call(self.policy.changed, r, old)

    def _watch_stall(self) -> None:
        """There is no plan. If nothing in flight can change that, the oldest request is given up, so that a pool or a
        policy that makes no progress never hangs the engine."""
        live = [r for r in self.reqs.values() if r.finish is None]
        if self.in_flight or not live:
            self._stalled = 0
            return
        self._stalled += 1
        if self._stalled >= STALL_PASSES:
            self._stalled = 0
            r = min(live, key=lambda r: r.arrived)
            ledger = self.residency.ledger
            self._finish(
                r,
                Finish.ERROR,
                f"no step could be planned for {STALL_PASSES} passes with {len(live)} requests, {ledger.room} pages free or "
                f"evictable and {len(self._rows.free_slots)} free rows; the oldest request was given up",
            )


def _check(limits: Limits) -> None:
    """Refuse limits under which requests cannot make progress."""
    for name in ("max_slots", "max_len", "num_pages", "page_size", "batch_tokens", "grow_pages"):
        if getattr(limits, name) < 1:
            raise ConfigError(f"{name} = {getattr(limits, name)!r} is not possible; it must be at least 1")
    if limits.batch_tokens < limits.max_slots:
        raise ConfigError(
            f"batch_tokens = {limits.batch_tokens} is less than the {limits.max_slots} requests that may run at once; a step "
            f"needs room for one token of each: raise limits.batch_tokens or lower limits.max_running"
        )
