"""The contract of every scheduler, run on this one, and the rule that makes it this one."""

from random import Random

import numpy as np
from minisgl_lifo import LifoScheduler

from minisgl.api import Admit, Limits, SamplingSpec, SchedContext, StepResult
from minisgl.sched.scheduler import Scheduler
from minisgl.testing import contract
from minisgl_plugins.cache.naive import NaiveCachePolicy

TestLifo = contract("scheduler", LifoScheduler)
TestImpatientLifo = contract("scheduler", LifoScheduler, {"patience": 1})


def first_of(patience: int, arrivals: int) -> int:
    """The uid that gets the only row when ``arrivals`` requests wait."""
    limits = Limits(max_slots=1, max_len=64, num_pages=16, page_size=4, batch_tokens=16)
    ctx = SchedContext(LifoScheduler.Settings(patience=patience), limits, Random(0), lambda: 0)
    scheduler = Scheduler(limits, NaiveCachePolicy(None), LifoScheduler(ctx))
    for uid in range(arrivals):
        scheduler.admit(Admit(uid, np.array([uid + 1], np.int32), SamplingSpec(max_new=1)))
    plan = scheduler.schedule()
    scheduler.commit(StepResult(plan.step, np.array([7], np.int32), np.array([False])))
    return plan.init[0].uid


def test_the_newest_goes_first():
    assert first_of(patience=10, arrivals=5) == 4


def test_who_was_overtaken_too_often_goes_first():
    assert first_of(patience=3, arrivals=5) == 0
