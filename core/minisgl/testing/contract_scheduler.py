"""The contract of scheduler policies."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import cast

import pytest

from minisgl.base.types import Admit, Finish, Limits, SamplingSpec
from minisgl.engine.loop import LoopContext, StepLoop
from minisgl.plugin.registry import Registry
from minisgl.sched.cache import CacheContext, CachePolicy
from minisgl.sched.policy import SchedContext, SchedulerPolicy
from minisgl.testing.cache_model import ints
from minisgl.testing.contracts import ComponentContract
from minisgl.testing.sim_engine import SimEngine
from minisgl.testing.simulator import expected
from minisgl.testing.traffic import Arrival, Driver, World, busy_world


def bundled_cache(name: str, ctx: CacheContext) -> CachePolicy:
    cls = Registry.scan().load("cache", name)
    return cast(CachePolicy, cls(replace(ctx, settings=cls.Settings())))


def bundled_loop(name: str) -> StepLoop:
    cls = Registry.scan().load("loop", name)
    return cast(StepLoop, cls(LoopContext(cls.Settings())))


class SchedulerContract(ComponentContract):
    """A whole engine on the simulated device: whatever the policy decides, outputs are the oracle's and all of them come."""

    def policy(self, ctx: SchedContext) -> SchedulerPolicy:
        return cast(SchedulerPolicy, self.cls(replace(ctx, settings=self.settings())))  # type: ignore[call-arg]

    def driver(self, world: World, cache: str = "radix", loop: str = "sync") -> Driver:
        return Driver(world, lambda ctx: bundled_cache(cache, ctx), self.policy, bundled_loop(loop))

    def engine(self, limits: Limits, loop: str = "sync") -> SimEngine:
        return SimEngine(limits, lambda ctx: bundled_cache("radix", ctx), self.policy, bundled_loop(loop))

    @pytest.mark.parametrize("loop", ["sync", "overlap"])
    @pytest.mark.parametrize("cache", ["radix", "naive"])
    @pytest.mark.parametrize("seed", range(6))
    def test_outputs_equal_the_oracle(self, seed: int, cache: str, loop: str) -> None:
        """Random arrivals, prefixes and aborts in a pool that is too small; every plan and page is checked."""
        driver = self.driver(busy_world(1000 + seed), cache, loop)
        driver.play()
        driver.check_end()
        driver.check_outputs()

    @pytest.mark.parametrize("loop", ["sync", "overlap"])
    def test_same_outputs_whatever_is_sampled_beside_it(self, loop: str) -> None:
        world = busy_world(77)
        alone = replace(world, limits=replace(world.limits, max_slots=1))
        outputs = []
        for w in (world, alone):
            w = replace(w, arrivals=tuple(replace(a, abort=None, follows=None) for a in w.arrivals))
            driver = self.driver(w, loop=loop)
            driver.play()
            outputs.append(driver.engine.tokens)
        assert outputs[0] == outputs[1]

    @pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (2, 4), (3, 2), (5, 1)])
    def test_works_in_a_tiny_pool(self, num_pages: int, page_size: int) -> None:
        """N3: one request fills the pool, the others wait."""
        room = num_pages * page_size
        arrivals = tuple(_arrival(prefix=n, max_new=room) for n in range(1, room) for _ in range(2))
        driver = self.driver(World(Limits(3, 64, num_pages, page_size, 3), -1, arrivals))
        driver.play()
        driver.check_end()
        driver.check_outputs()

    def test_nobody_starves(self) -> None:
        """Requests keep coming; each of the first ones ends within a bound."""
        engine = self.engine(Limits(4, 128, 40, 4, 24))
        rng, admits = Random(3), {}
        for turn in range(600):
            if turn % 4 == 0:
                uid = turn // 4
                admits[uid] = Admit(uid, ints([rng.randrange(90) for _ in range(30)]), SamplingSpec(max_new=8))
                engine.inbox.append(admits[uid])
            engine.turn()
        for uid in range(20):
            assert uid in engine.ended, (
                f"request {uid} has not ended after 600 turns: {dict(engine.scheduler.counts())}"
            )
            assert engine.ended[uid].finish is Finish.LENGTH
            assert engine.tokens[uid] == expected(admits[uid], 128)[0]

    def test_is_deterministic(self) -> None:
        plans = []
        for _ in range(2):
            driver = self.driver(busy_world(5))
            driver.play()
            plans.append([str(p) for p in driver.engine.plans])
        assert plans[0] == plans[1]


def _arrival(prefix: int, max_new: int) -> Arrival:
    return Arrival(0, 0, prefix, 0, max_new, 0, None, None, b"", 0, 0)
