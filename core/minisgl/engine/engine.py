"""The engine: scheduler, loop and executor joined. One thread owns all of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from minisgl.base.errors import Fault, MiniSGLError, RequestError
from minisgl.base.types import Admit, Ended, EngineInfo, EngineOutput, Refused, StepPlan, StepResult, Tokens
from minisgl.engine.executor import Executor
from minisgl.engine.loop import StepLoop, Ticket
from minisgl.engine.port import Abort, Control, EngineInput, EnginePort, Stop
from minisgl.observe import Observer, RequestEvent, StepStats
from minisgl.sched.scheduler import Scheduler

log = logging.getLogger("minisgl.engine")

IDLE_WAIT_MS = 200  # a blocked intake looks up this often
PREPARE_S = 0.001  # a request that is prepared within it is admitted at once
IDLE_PREPARE_S = 0.005  # how long an engine without work waits for one before it looks for others


class Observers:
    """Calls each observer; one that raises is named once and is off from then on."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.active = list(observers)

    def call(self, method: str, *args: Any) -> None:
        for observer in tuple(self.active):
            try:
                getattr(observer, method)(*args)
            except Exception:
                log.exception("observer %s failed in %s() and is off now", type(observer).__name__, method)
                self.active.remove(observer)

    def snapshot(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for observer in tuple(self.active):
            try:
                counters = dict(observer.snapshot())
                json.dumps(counters)  # what cannot be sent is the observer's failure, not the engine's
                merged.update(counters)
            except Exception:
                log.exception("observer %s failed in snapshot() and is off now", type(observer).__name__)
                self.active.remove(observer)
        return merged


class Engine:
    """Implements the loop's primitives (``EngineOps``). ``info``: what the engine says of itself.

    ``turn()`` is one pass of the loop; ``run()`` makes passes until a Stop arrives. A request that is wrong is refused and
    nothing else is affected; an exception out of ``turn()`` means the engine is dead. ``queue_limit``: most requests beyond
    the ``max_running`` that can run; None: any number. ``queue_tokens``: most prompt tokens of requests without output yet.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        loop: StepLoop,
        port: EnginePort,
        info: EngineInfo,
        queue_limit: int | None,
        queue_tokens: int | None = None,
        stall_s: float,
        observers: Sequence[Observer] = (),
        check_plan: Callable[[StepPlan], None] | None = None,
        audit: bool = False,
    ) -> None:
        self.scheduler, self.executor, self.loop, self.port, self.info = scheduler, executor, loop, port, info
        self.observers = Observers(observers)
        self._queue_limit, self._queue_tokens, self._stall_s = queue_limit, queue_tokens, stall_s
        self._check_plan, self._audit = check_plan, audit
        self._stopping = False
        self._schedule_ns = 0
        self._running: dict[int, tuple[int, StepPlan, int]] = {}  # step -> (submitted at, plan, schedule_ns)
        self._first_token_due: dict[int, int] = {}  # uid -> prompt tokens
        self._tokens_due = 0  # sum of them
        self._preparing: list[tuple[Admit, Future[None]]] = []
        self._left: set[int] = set()  # uids of those that were aborted meanwhile

    # ------------------------------------------------------------------------------------------------------- EngineOps

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._running and not self._preparing

    @property
    def heartbeat(self) -> tuple[int, int]:
        """(last committed step, monotonic ns since when the oldest step in flight runs; 0 if none). Any thread may read it."""
        oldest = min((started for started, _, _ in list(self._running.values())), default=0)
        return self.scheduler.done_step, oldest

    def intake(self, block: bool) -> None:
        for message in self.port.receive(IDLE_WAIT_MS if block else 0):
            self._take(message)
        if self._preparing:
            self._see_prepared(IDLE_PREPARE_S if self.scheduler.idle and not self._running else 0)

    def _take(self, message: EngineInput) -> None:
        if isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, Abort):
            self._left |= {a.uid for a, _ in self._preparing if a.uid in message.uids}
            for uid in message.uids:
                self.scheduler.abort(uid)
        elif isinstance(message, Control):
            message.reply(self._control(message.op))
        elif isinstance(message, Stop):
            self._stopping = True

    def _admit(self, a: Admit) -> None:
        refused = self._overload(a) or self._check(a)
        prepared = self.executor.prepare(a) if refused is None else None
        if prepared is None:
            self._enter(a, refused)
            return
        wait_for = 0 if self._preparing else PREPARE_S  # once for requests that come together
        self._preparing.append((a, prepared))
        self._see_prepared(wait_for)

    def _see_prepared(self, seconds: float) -> None:
        """Admit what is prepared. Waits so long if nothing is."""
        wait([done for _, done in self._preparing], seconds, FIRST_COMPLETED)
        ready = [(a, done) for a, done in self._preparing if done.done()]
        self._preparing = [(a, done) for a, done in self._preparing if not done.done()]
        for a, done in ready:
            failed = done.exception()
            if failed is not None:
                log.error("request %d could not be prepared", a.uid, exc_info=failed)
            why = "the request could not be prepared"
            self._enter(a, None if failed is None else Refused(a.uid, 500, why, "internal_error"))
            if a.uid in self._left:
                self._left.discard(a.uid)
                self.scheduler.abort(a.uid)

    def _enter(self, a: Admit, refused: Refused | None) -> None:
        refused = refused or self.scheduler.admit(a)
        if refused is not None:
            self.port.send(a.owner, [refused])
            self.observers.call("request", RequestEvent(a.uid, "refused", time.monotonic_ns(), len(a.ids)))
            return
        self._first_token_due[a.uid] = len(a.ids)
        self._tokens_due += len(a.ids)
        self.observers.call("request", RequestEvent(a.uid, "admitted", time.monotonic_ns(), len(a.ids)))

    @property
    def _n_waiting(self) -> int:
        """Requests that wait for their first step, or for what they need before it."""
        return self.scheduler.n_waiting + len(self._preparing)

    def _overload(self, a: Admit) -> Refused | None:
        """What is open is counted, not what waits: requests that come together all wait before the first of them runs."""
        waiting, running = self._n_waiting, self.scheduler.n_running
        tokens = self._tokens_due + sum(len(p.ids) for p, _ in self._preparing)
        if self._queue_limit is not None and waiting + running >= self.info.max_running + self._queue_limit:
            why = f"{running} requests run and {waiting} wait, which is the limit (limits.max_running + limits.queue)"
        elif self._queue_tokens is not None and tokens and tokens + len(a.ids) > self._queue_tokens:
            why = (
                f"{tokens} prompt tokens wait, and {len(a.ids)} more would be over the limit of "
                f"{self._queue_tokens} (limits.queue_tokens)"
            )
        else:
            return None
        return Refused(a.uid, 503, f"{why}; try again later", "server_overloaded")

    def _check(self, a: Admit) -> Refused | None:
        if a.sampling.extra:
            try:
                self.executor.check(a.sampling.extra)
            except RequestError as e:
                return Refused(a.uid, e.status, e.message, e.code, e.param)
        return None

    def schedule(self) -> StepPlan | None:
        start = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        self._schedule_ns = time.perf_counter_ns() - start
        if plan is not None and self._check_plan is not None:
            self._check_plan(plan)
        return plan

    def submit(self, plan: StepPlan) -> Ticket:
        if len(self._running) >= self.loop.depth:
            raise Fault(f"loop {type(self.loop).__name__} has more than depth={self.loop.depth} steps in flight")
        now = time.monotonic_ns()
        self._running[plan.step] = (now, plan, self._schedule_ns)
        if self.observers.active:
            for init in plan.init:
                self.observers.call("request", RequestEvent(init.uid, "scheduled", now))
        return self.executor.submit(plan)

    def collect(self, t: Ticket) -> StepResult:
        return self.executor.collect(t, self._stall_s)

    def commit(self, r: StepResult) -> None:
        started, plan, schedule_ns = self._running.pop(r.step)
        self.scheduler.commit(r)
        if self._audit:
            self.scheduler.audit()
        if self.observers.active:
            self._observe_step(plan, schedule_ns, time.monotonic_ns() - started)

    def flush(self) -> None:
        for owner, outputs in self.scheduler.take_outputs().items():
            self.port.send(owner, outputs)
            if self._first_token_due or self.observers.active:
                self._observe_outputs(outputs)

    # ------------------------------------------------------------------------------------------------------------ life

    def turn(self) -> None:
        """One pass: take in, schedule, submit, collect, commit, send."""
        self.loop.turn(self)

    def run(self) -> None:
        """Passes until Stop. Raises: Fault and whatever a component raised; the engine is then dead."""
        while not self._stopping:
            self.turn()

    def close(self, grace: float = 5.0) -> None:
        """Stop the executor and the observers; idempotent."""
        self._stopping = True
        self.executor.stop(grace)
        self.observers.call("close")
        self.observers.active.clear()

    # ------------------------------------------------------------------------------------------------ control, observers

    def stats(self) -> dict[str, Any]:
        """Counters of scheduler and cache, the share of prompt tokens that were cached, whether the device is well, and what
        observers add."""
        health, counts = self.executor.health(), self.scheduler.counts()
        return {
            "step": self.scheduler.done_step,
            "device_ok": health.ok,
            "in_flight": len(self._running),
            **counts,
            "waiting": self._n_waiting,
            "hit_rate": counts["cached_tokens_total"] / max(1, counts["prompt_tokens_total"]),
            **self.observers.snapshot(),
        }

    def _control(self, op: str) -> bytes:
        answer: Mapping[str, Any]
        try:
            if op == "stats":
                answer = self.stats()
            elif op == "flush_cache":
                answer = {"freed_pages": self.scheduler.clear_cache()}
            elif op == "audit":
                self.scheduler.audit()
                answer = {"ok": True}
            else:
                answer = {"error": f"unknown operation {op!r}; known: audit, flush_cache, stats"}
        except (AssertionError, MiniSGLError) as exc:
            answer = {"error": f"{op}: {exc}", "known": True}
        return json.dumps(answer).encode()

    def _observe_step(self, plan: StepPlan, schedule_ns: int, run_ns: int) -> None:
        counts = self.scheduler.counts()
        stats = StepStats(
            step=plan.step,
            n_decode=plan.n_decode,
            n_spans=len(plan.spans),
            prefill_tokens=plan.num_tokens - plan.n_decode,
            n_waiting=self._n_waiting,
            n_running=self.scheduler.n_running,
            free_pages=counts["free"],
            evictable_pages=counts["evictable"],
            locked_pages=counts["locked"],
            schedule_ns=schedule_ns,
            run_ns=run_ns,
        )
        self.observers.call("step", stats)

    def _observe_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        now = time.monotonic_ns()
        due = self._first_token_due
        for out in outputs:
            if isinstance(out, Ended):
                self._tokens_due -= due.pop(out.uid, 0)
                event = RequestEvent(
                    out.uid, "ended", now, out.prompt_tokens, out.cached_tokens, out.output_tokens, str(out.finish)
                )
                self.observers.call("request", event)
            elif due and isinstance(out, Tokens):
                for uid in due.keys() & out.uids.tolist():
                    self._tokens_due -= due.pop(uid)
                    self.observers.call("request", RequestEvent(uid, "first_token", now))
