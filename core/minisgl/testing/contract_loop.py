"""The contract of step loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from minisgl.base.types import Admit, Limits, ReqState, SamplingSpec, StepResult
from minisgl.engine.loop import LoopContext, StepLoop
from minisgl.plugin.registry import Registry
from minisgl.sched.policy import ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder
from minisgl.testing.cache_model import ints
from minisgl.testing.contract_scheduler import bundled_cache
from minisgl.testing.contracts import ComponentContract
from minisgl.testing.sim_engine import SimEngine
from minisgl.testing.simulator import expected
from minisgl.testing.traffic import Driver, busy_world


def bundled_policy(ctx: SchedContext) -> SchedulerPolicy:
    cls = Registry.scan().load("scheduler", "chunked")
    return cast(SchedulerPolicy, cls(replace(ctx, settings=cls.Settings())))


class Pausing(SchedulerPolicy):
    """Asked while a request waits, it plans nothing in every other pass."""

    def __init__(self, ctx: SchedContext) -> None:
        self._inner = bundled_policy(ctx)
        self._passes = 0

    def arrived(self, r: ReqView) -> None:
        self._inner.arrived(r)

    def changed(self, r: ReqView, old: ReqState) -> None:
        self._inner.changed(r, old)

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        self._passes += 1
        if self._passes % 2:
            b.decode(False)
        else:
            self._inner.plan(v, b)


class Watched(SimEngine):
    """Notes when the loop may block and what it leaves unsent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocked = 0
        self.unsent = False

    def intake(self, block: bool) -> None:
        if block and not self.inbox:
            assert self.idle, f"the loop waits for arrivals with work to do: {dict(self.scheduler.counts())}"
            assert not self.unsent, "the loop waits for arrivals with outputs not flushed"
            self.blocked += 1
        super().intake(block)

    def commit(self, r: StepResult) -> None:
        super().commit(r)
        self.unsent = True

    def flush(self) -> None:
        super().flush()
        self.unsent = False

    def turn(self) -> None:
        super().turn()
        assert not self.unsent, "a turn ended with outputs not flushed"


class LoopContract(ComponentContract):
    """Depth, order, outputs, draining; the engine checks depth and order of every call."""

    def loop(self) -> StepLoop:
        return cast(StepLoop, self.cls(LoopContext(self.settings())))  # type: ignore[call-arg]

    def engine(self) -> Watched:
        return Watched(Limits(4, 128, 60, 4, 40), lambda c: bundled_cache("radix", c), bundled_policy, self.loop())

    @pytest.mark.parametrize("seed", range(10))
    def test_outputs_equal_the_oracle(self, seed: int) -> None:
        """So they are the same as those of any other loop."""
        world = busy_world(2000 + seed)
        driver = Driver(world, lambda c: bundled_cache("radix", c), bundled_policy, self.loop())
        driver.play()
        driver.check_end()
        driver.check_outputs()
        assert driver.engine.max_in_flight <= self.loop().depth

    def test_reaches_its_depth(self) -> None:
        engine = self.engine()
        engine.inbox.append(Admit(0, ints(range(9)), SamplingSpec(max_new=20)))
        engine.run()
        assert engine.max_in_flight == engine.loop.depth

    def test_drains_what_is_in_flight(self) -> None:
        """After the last output the loop leaves nothing in flight, without another arrival."""
        engine = self.engine()
        admits = [Admit(uid, ints(range(5 + uid)), SamplingSpec(max_new=3 + uid)) for uid in range(6)]
        engine.inbox.extend(admits)
        engine.run()
        assert engine.scheduler.in_flight == 0
        for a in admits:
            assert engine.tokens[a.uid] == expected(a, 128)[0]

    def test_goes_on_after_a_pass_without_a_plan(self) -> None:
        """A request that cannot run now is looked at again, without another arrival."""
        engine = Watched(Limits(1, 128, 60, 4, 40), lambda c: bundled_cache("radix", c), Pausing, self.loop())
        admits = [Admit(uid, ints(range(5 + uid)), SamplingSpec(max_new=6)) for uid in range(3)]
        engine.inbox.extend(admits)
        engine.run()
        assert engine.blocked == 0
        for a in admits:
            assert engine.tokens[a.uid] == expected(a, 128)[0]

    def test_waits_only_when_there_is_nothing_to_do(self) -> None:
        """Blocks when idle instead of spinning, and never while a request or a step is there."""
        engine = self.engine()
        engine.turn()
        assert engine.blocked == 1
        engine.inbox.append(Admit(0, ints(range(9)), SamplingSpec(max_new=4)))
        engine.run()
        assert engine.blocked == 1
        engine.turn()
        assert engine.blocked == 2
