"""The local executor: one device, driven by a thread of this process, so that scheduling and computing overlap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minisgl.api import ExecContext, ExecHealth, ExecInfo, Executor, Fault, MiniSGLError, StepPlan, StepResult, Ticket

if TYPE_CHECKING:
    from minisgl.api.device import Worker


class LocalExecutor(Executor):
    """The thread builds the worker and runs every step, in the order they were submitted. After a step has failed, the
    later ones are not run: collecting any of them raises the same fault."""

    def __init__(self, ctx: ExecContext) -> None:
        self.ctx = ctx
        self._jobs: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | Fault] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fault: Fault | None = None
        self._done = -1  # last finished step

    def start(self) -> ExecInfo:
        assert self._thread is None, "started twice"
        built: queue.SimpleQueue[ExecInfo | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(built.put,), name="minisgl-worker", daemon=True)
        self._thread.start()
        result = built.get()
        if isinstance(result, MiniSGLError):
            raise result
        if isinstance(result, BaseException):
            raise Fault(f"the worker did not start: {type(result).__name__}: {result}") from result
        return result

    def submit(self, plan: StepPlan) -> Ticket:
        self._jobs.put(plan)
        return Ticket(plan.step)

    def collect(self, ticket: Ticket, timeout: float) -> StepResult:
        if self._fault is not None:
            raise self._fault
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            self._fault = Fault(
                f"step {ticket.step} has not finished within {timeout:g} s; the device hangs or is too slow"
            )
            raise self._fault from None
        if isinstance(result, Fault):
            self._fault = result
            raise result
        assert result.step == ticket.step, f"step {ticket.step} was collected, step {result.step} is next"
        return result

    def health(self) -> ExecHealth:
        if self._fault is not None:
            return ExecHealth(False, self._done, str(self._fault))
        alive = self._thread is not None and self._thread.is_alive()
        return ExecHealth(alive, self._done, "" if alive else "the worker thread does not run")

    def stop(self, grace: float) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(grace)

    # ------------------------------------------------------------------------------------------------ the worker thread
    def _main(self, built: Callable[[Any], None]) -> None:
        try:
            worker = self._build()
        except BaseException as exc:
            built(exc)
            return
        built(worker.info)
        self._serve(worker)
        worker.close()

    def _build(self) -> Worker:
        from minisgl.nn import build_worker

        c = self.ctx
        return build_worker(c.config, c.registry, c.model, c.facts, c.progress)

    def _serve(self, worker: Worker) -> None:
        while (plan := self._jobs.get()) is not None:
            try:
                result = worker.run(plan)
            except BaseException as exc:
                fault = Fault(f"step {plan.step} failed: {type(exc).__name__}: {exc}")
                fault.__cause__ = exc
                self._results.put(fault)
                return
            self._done = plan.step
            self._results.put(result)
