"""The local executor: one device, driven by a thread of this process, so that scheduling and computing overlap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic import Field

from minisgl.api import (
    Admit,
    ExecContext,
    ExecHealth,
    ExecInfo,
    Executor,
    Fault,
    MiniSGLError,
    PluginSettings,
    StepPlan,
    StepResult,
    Ticket,
)

if TYPE_CHECKING:
    from minisgl.api.device import Pending, Worker


class LocalSettings(PluginSettings):
    nvtx: bool = Field(False, description="name each step in an NVTX range, for Nsight Systems; needs a CUDA device")


class LocalExecutor(Executor):
    """The thread builds the worker and launches every step, in the order they were submitted; a second one waits for those
    that a device still computes, so that the first is free to launch the next. After a step has failed, the later ones are
    not run: collecting any of them raises the same fault."""

    Settings = LocalSettings

    def __init__(self, ctx: ExecContext) -> None:
        self.ctx = ctx
        self._jobs: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Pending | Fault | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | Fault] = queue.SimpleQueue()
        self._preparer = ThreadPoolExecutor(1, "minisgl-prepare")
        self._thread: threading.Thread | None = None
        self.worker: Worker | None = None  # once it is built; its ``stats`` may be read from any thread
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

    def check(self, extra: Mapping[str, Any]) -> None:
        assert self.worker is not None, "checked before it was started"
        self.worker.picker.check(extra)

    def prepare(self, admit: Admit) -> Future[None] | None:
        """A grammar is compiled by a thread of its own; steps go on meanwhile."""
        assert self.worker is not None, "prepared before it was started"
        forms, compiled = self.worker.forms, admit.sampling.grammar
        return None if forms is None or not compiled else self._preparer.submit(forms.prepare, admit.uid, compiled)

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
        self._preparer.shutdown(wait=False, cancel_futures=True)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(grace)

    # ------------------------------------------------------------------------------------------------ the worker thread
    def _main(self, built: Callable[[Any], None]) -> None:
        from minisgl.api.device import StepRanges

        try:
            self._ranges = StepRanges(self.ctx.settings.nvtx)
            worker = self._build()
        except BaseException as exc:
            built(exc)
            return
        waiter = threading.Thread(target=self._wait, name="minisgl-results", daemon=True)
        waiter.start()
        self.worker = worker
        built(worker.info)
        self._serve(worker)
        self._launched.put(None)
        waiter.join()
        worker.close()

    def _build(self) -> Worker:
        from minisgl.nn import build_worker

        c = self.ctx
        return build_worker(c.config, c.registry, c.model, c.facts, c.progress, depth=c.loop_depth)

    def _serve(self, worker: Worker) -> None:
        while (plan := self._jobs.get()) is not None:
            try:
                with self._ranges.step(plan):
                    pending = worker.launch(plan)
                if pending.done is None:
                    self._finish(pending)
                else:
                    self._launched.put(pending)
            except BaseException as exc:
                self._launched.put(_fault(plan.step, exc))
                return

    # ------------------------------------------------------------------------------------------------ the waiting thread
    def _wait(self) -> None:
        while (pending := self._launched.get()) is not None:
            if isinstance(pending, Fault):
                self._results.put(pending)
                continue
            try:
                self._finish(pending)
            except BaseException as exc:  # an error of the device shows when it is waited for
                self._results.put(_fault(pending.step, exc))

    def _finish(self, pending: Pending) -> None:
        result = pending.result()
        self._done = result.step
        self._results.put(result)


def _fault(step: int, exc: BaseException) -> Fault:
    fault = Fault(f"step {step} failed: {type(exc).__name__}: {exc}")
    fault.__cause__ = exc
    return fault
