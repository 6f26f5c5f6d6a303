"""The scheduler's own time, on a device that takes none: decode steps, and the admission of many requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.base.errors import ConfigError
from minisgl.base.types import I32, Admit, Limits, SamplingSpec, StepPlan, StepResult
from minisgl.sched.scheduler import Scheduler
from minisgl.wire.sockets import Outbox

FILL = 1024  # tokens of the prompts that fill the pool
PREFIXES, PREFIX, TAIL = 10, 2048, 64  # of the admitted requests
WARM_UP = 20  # steps
Make = Callable[[Limits], Scheduler]


class Host:
    """A scheduler whose outputs go to another process over a socket."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox) -> None:
        self.scheduler, self._outbox = scheduler, outbox
        self._rng = np.random.default_rng(0)
        self._uids = 0

    def prompt(self, n: int) -> I32:
        return self._rng.integers(0, 1 << 17, n).astype(np.int32)

    def admit(self, ids: I32, max_new: int) -> None:
        self._uids += 1
        refused = self.scheduler.admit(Admit(self._uids, ids, SamplingSpec(temperature=0.0, max_new=max_new)))
        assert refused is None, refused

    def step(self) -> float:
        """Returns: us of schedule, commit and sending the outputs."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter() - start
        assert plan is not None, dict(self.scheduler.counts())
        result = _result(plan)
        start = time.perf_counter()
        self.scheduler.commit(result)
        for outputs in self.scheduler.take_outputs().values():
            for output in outputs:
                self._outbox.send(output)
        return (planned + time.perf_counter() - start) * 1e6

    def fill(self) -> None:
        """Make every page of the pool hold a cached prefix that nothing uses.

        Raises: ConfigError if the cache keeps too little for that.
        """
        limits = self.scheduler.limits
        for _ in range(limits.num_pages * limits.page_size // FILL):
            self.admit(self.prompt(FILL), 1)
        while not self.scheduler.idle:
            self.step()
        counts = self.scheduler.counts()
        if counts["free"] or counts["evictable"] != limits.num_pages:
            raise ConfigError(
                f"bench host needs a cache that keeps every finished prompt; of {limits.num_pages} pages it kept "
                f"{counts['evictable']}: choose another one, such as --cache radix"
            )


def _result(plan: StepPlan) -> StepResult:
    n = plan.n_decode + sum(span.sample for span in plan.spans)
    return StepResult(plan.step, np.full(n, plan.step % 1000, np.int32), np.zeros(n, np.bool_))


def decode_steps(make: Make, outbox: Outbox, rows: int, page_size: int, steps: int) -> dict[str, Any]:
    """Time per step while ``rows`` rows decode; all the pages they are given are evicted ones."""
    life = WARM_UP + steps + 8 + rows // 32  # output tokens; the first rows decode while the last prompts are computed
    own = 64 + 16 + life  # most tokens of a row
    tokens = max(4 * FILL, -(-rows * (own + page_size) // FILL) * FILL)
    host = Host(make(Limits(rows, 2 * max(own, FILL), tokens // page_size, page_size, 8192)), outbox)
    host.fill()
    for i in range(rows):
        host.admit(host.prompt(64 + i % 16), life)  # in each step another sixteenth needs a page
    while host.scheduler.n_decode < rows:
        host.step()
    for _ in range(WARM_UP):
        host.step()
    before = host.scheduler.counts()["cache_evicted_pages"]
    times = [host.step() for _ in range(steps)]
    evicted = host.scheduler.counts()["cache_evicted_pages"] - before
    assert host.scheduler.n_decode == rows, "rows ended while they were measured"
    return {
        "rows": rows,
        "page": page_size,
        "median_us": float(np.median(times)),
        "p99_us": float(np.percentile(times, 99)),
        "evicted_pages": evicted / steps,
        "cached": tokens,
    }


def admission(make: Make, outbox: Outbox, requests: int, page_size: int) -> dict[str, Any]:
    """``requests`` come at once, each with one of PREFIXES cached prefixes; until all of them run."""
    tokens = -(-(PREFIXES * PREFIX + requests * (TAIL + 64 + page_size)) // FILL) * FILL
    host = Host(make(Limits(requests, 2 * PREFIX, tokens // page_size, page_size, 8192)), outbox)
    prefixes = [host.prompt(PREFIX) for _ in range(PREFIXES)]
    host.fill()
    for prefix in prefixes:
        host.admit(prefix, 1)
    while not host.scheduler.idle:
        host.step()
    prompts = [np.concatenate([prefixes[i % PREFIXES], host.prompt(TAIL)]) for i in range(requests)]
    before = host.scheduler.counts()["cache_hit_tokens"]
    start = time.perf_counter()
    for prompt in prompts:
        host.admit(prompt, 64)
    queued = (time.perf_counter() - start) * 1e6
    times = []
    while host.scheduler.n_decode < requests:
        times.append(host.step())
    total = queued + sum(times)
    return {
        "requests": requests,
        "page": page_size,
        "queue_us": queued / requests,
        "start_us": sum(times) / requests,
        "requests_per_s": round(requests / total * 1e6),
        "steps": len(times),
        "cached_share": (host.scheduler.counts()["cache_hit_tokens"] - before) / (requests * (PREFIX + TAIL)),
    }
