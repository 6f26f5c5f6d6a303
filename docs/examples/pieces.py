"""The scheduler and a radix cache in a script of their own, without a model: how many prompt tokens does sharing save?

Run it: python docs/examples/pieces.py
"""

from __future__ import annotations

from random import Random

import numpy as np

from minisgl.api import Admit, CacheContext, Limits, SamplingSpec, SchedContext, StepPlan, StepResult
from minisgl.plugin.registry import Registry
from minisgl.sched.scheduler import Scheduler


def device(plan: StepPlan) -> StepResult:
    """Stands in for a model: every row that samples gets token 1, and nothing stops early."""
    rows = plan.n_decode + sum(span.sample for span in plan.spans)
    return StepResult(plan.step, np.ones(rows, np.int32), np.zeros(rows, bool))


def serve(cache: str, prompts: list[np.ndarray]) -> int:
    """Runs all prompts, one arriving every other step; returns how many prompt tokens were computed."""
    limits = Limits(max_slots=8, max_len=512, num_pages=256, page_size=16, batch_tokens=128)
    registry = Registry.scan()
    scheduler = Scheduler(
        limits,
        registry.create("cache", cache, {}, lambda s: CacheContext(limits.page_size, limits.num_pages, s, lambda: 0)),
        registry.create("scheduler", "chunked", {}, lambda s: SchedContext(s, limits, Random(0), lambda: 0)),
    )
    waiting = list(enumerate(prompts))
    computed = step = 0
    while waiting or not scheduler.idle:
        if waiting and step % 2 == 0:
            uid, ids = waiting.pop(0)
            scheduler.admit(Admit(uid, ids, SamplingSpec(max_new=16)))
        if (plan := scheduler.schedule()) is not None:
            computed += plan.num_tokens - plan.n_decode
            scheduler.commit(device(plan))
        scheduler.take_outputs()
        scheduler.audit()  # every page has exactly one owner, after every step
        step += 1
    return computed


def main() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 1000, 200, dtype=np.int32)  # what all prompts begin with
    prompts = [np.concatenate([system, rng.integers(0, 1000, 40, dtype=np.int32)]) for _ in range(20)]
    total = sum(map(len, prompts))
    for cache in ("naive", "radix"):
        computed = serve(cache, prompts)
        print(f"{cache:>6}: computed {computed} of {total} prompt tokens, {1 - computed / total:.0%} saved")


if __name__ == "__main__":
    main()
