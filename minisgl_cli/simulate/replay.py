"""Requests played into a real engine as they come, to measure what a simulation predicts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minisgl.api import ExecHealth, ExecInfo, Executor, StepPlan, StepResult, Ticket
from minisgl.base.types import Admit, SamplingSpec
from minisgl.client.pipeline import Pipeline
from minisgl_cli.simulate.calibrate import MeasuredStep
from minisgl_cli.simulate.cost import Work
from minisgl_cli.simulate.device import Meter
from minisgl_cli.simulate.measure import Recorder
from minisgl_cli.simulate.workload import Request


class TimedExecutor(Executor):
    """An executor that keeps what each step computes and how long it takes: ``steps``. Put around the real one before its
    first step, since rows are followed from plan to plan. A step begins when it is submitted or, if that is later, when the
    one before it has been collected: a loop that overlaps waits for each, so its host is not in the way.
    ``clock``: seconds."""

    def __init__(self, inner: Executor, max_slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner, self.steps = inner, list[MeasuredStep]()
        self._clock, self._meter = clock, Meter(max_slots)
        self._flying: deque[tuple[Work, float]] = deque()
        self._collected = 0.0

    def start(self) -> ExecInfo:
        return self.inner.start()

    def submit(self, plan: StepPlan) -> Ticket:
        work, _ = self._meter.run(plan)
        self._flying.append((work, self._clock()))
        return self.inner.submit(plan)

    def collect(self, ticket: Ticket, timeout: float) -> StepResult:
        result = self.inner.collect(ticket, timeout)
        work, submitted = self._flying.popleft()
        now = self._clock()
        self.steps.append(MeasuredStep.of(work, now - max(submitted, self._collected)))
        self._collected = now
        return result

    def health(self) -> ExecHealth:
        return self.inner.health()

    def stop(self, grace: float) -> None:
        self.inner.stop(grace)


def timed(pipeline: Pipeline) -> TimedExecutor:
    """Measure the steps of ``pipeline``, which has made none yet, from now on."""
    found = TimedExecutor(pipeline.engine.executor, pipeline.info.max_running)
    pipeline.engine.executor = found
    return found


def replay(pipeline: Pipeline, requests: Sequence[Request]) -> dict[str, Any]:
    """Play ``requests``, none of which follows another, in real time into an idle engine with an empty cache. Greedy, to their
    output's length. Returns: the recorder's summary (see Recorder)."""
    assert all(r.follows is None for r in requests)
    pipeline.engine.scheduler.clear_cache()
    vocab = pipeline.info.vocab
    admits = [
        Admit(uid, (r.prompt() % vocab).astype(np.int32), SamplingSpec(temperature=0.0, max_new=r.output_len))
        for uid, r in enumerate(requests)
    ]
    recorder, start = Recorder(len(requests)), time.perf_counter()
    due = deque(sorted(range(len(requests)), key=lambda uid: requests[uid].at_s))
    while due or not pipeline.idle:
        now = time.perf_counter() - start
        while due and requests[due[0]].at_s <= now:
            uid = due.popleft()
            recorder.arrived[uid] = requests[uid].at_s
            pipeline.admit(admits[uid])
        if pipeline.idle:
            time.sleep(requests[due[0]].at_s - now)
        else:
            outputs = pipeline.poll_after_turn()
            recorder.take(outputs, time.perf_counter() - start)
    return recorder.summary()
