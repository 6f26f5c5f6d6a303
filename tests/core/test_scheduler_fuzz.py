"""Random histories of requests against an oracle that has no engine, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from minisgl.base.types import Finish, Limits
from minisgl.engine.loop import LoopContext
from minisgl.sched.policy import UNBOUNDED, ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder
from minisgl.testing.sim_engine import build
from minisgl.testing.simulator import expected
from minisgl.testing.traffic import Arrival, Driver, World, busy_world
from minisgl_plugins.cache.naive import NaiveCachePolicy
from minisgl_plugins.cache.radix import RadixCachePolicy
from minisgl_plugins.loop.overlap import OverlapLoop
from minisgl_plugins.loop.sync import SyncLoop
from minisgl_plugins.scheduler.chunked import ChunkedScheduler
from minisgl_plugins.scheduler.fair import FairScheduler
from minisgl_plugins.scheduler.lpm import LongestPrefixScheduler
from minisgl_plugins.scheduler.prefill_first import PrefillFirstScheduler

POLICIES: tuple[tuple[type[SchedulerPolicy], dict[str, Any]], ...] = (
    (ChunkedScheduler, {}),
    (ChunkedScheduler, {"order": "longest", "tile_tokens": 8}),
    (PrefillFirstScheduler, {}),
    (LongestPrefixScheduler, {"max_wait": 10, "window": 4}),
    (FairScheduler, {}),
)


@dataclass(frozen=True)
class Setup:
    """The plugins under test."""

    overlap: bool
    radix: bool
    max_chunk: int | None
    reserve: float
    policy: type[SchedulerPolicy] = ChunkedScheduler
    options: Mapping[str, Any] = field(default_factory=dict)

    def driver(self, world: World, policy: type[SchedulerPolicy] | None = None) -> Driver:
        mine = build(self.policy, reserve=self.reserve, max_chunk=self.max_chunk, **self.options)
        return Driver(
            world,
            build(RadixCachePolicy if self.radix else NaiveCachePolicy),
            mine if policy is None else build(policy),
            (OverlapLoop if self.overlap else SyncLoop)(LoopContext(None)),
        )

    def play_and_check(self, world: World) -> None:
        driver = self.driver(world)
        driver.play()
        driver.check_end()
        driver.check_outputs()
        counts = driver.engine.scheduler.counts()
        event(f"preempted: {counts['preemptions'] > 0}, cached: {counts['cached_tokens_total'] > 0}")
        if self.reserve == 1.0:
            assert counts["preemptions"] == 0, "what is admitted with its whole context never lacks a page"


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 64]))
    pool = draw(st.sampled_from([12, 30, 64, 150, 400]))  # tokens
    slots = draw(st.integers(1, 8))
    return Limits(
        max_slots=slots,
        max_len=draw(st.sampled_from([16, 40, 100, 300])),
        num_pages=max(pool // page_size, draw(st.integers(1, 4))),
        page_size=page_size,
        batch_tokens=slots + draw(st.sampled_from([0, 1, 6, 60, 500])),
        grow_pages=draw(st.sampled_from([1, 1, 2, 5])),
    )


def arrivals(most: int, page_size: int, room: int) -> st.SearchStrategy[list[Arrival]]:
    prefix = st.one_of(
        st.integers(0, min(room + 2, 200)),
        st.integers(0, max(1, room // page_size)).map(lambda k: min(k * page_size, 200)),
    )
    one = st.builds(
        Arrival,
        wait=st.sampled_from([0, 0, 0, 1, 3, 12]),
        base=st.integers(0, 2),
        prefix=prefix,
        tail=st.sampled_from([0, 0, 1, 2, 5]),
        max_new=st.sampled_from([1, 2, 5, 12, 40]),
        stops=st.sampled_from([0, 1, 8]),
        follows=st.one_of(st.none(), st.none(), st.integers(0, most)),
        abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
        namespace=st.sampled_from([b"", b"", b"", b"salt"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        owner=st.integers(0, 1),
    )
    return st.lists(one, min_size=1, max_size=most)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    lim = draw(limits())
    return World(
        limits=lim,
        flush_at=draw(st.sampled_from([-1, 5, 25])),
        arrivals=tuple(draw(arrivals(16, lim.page_size, min(lim.max_len, lim.num_pages * lim.page_size)))),
    )


setups = st.builds(
    lambda policy, **more: Setup(policy=policy[0], options=policy[1], **more),
    policy=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    radix=st.sampled_from([True, True, True, False]),
    max_chunk=st.sampled_from([None, None, 1, 7, 512]),
    reserve=st.sampled_from([1.0, 1.0, 0.4, 0.01]),
)


def busy_setup(seed: int) -> Setup:
    rnd = Random(seed + 1)
    chunk = rnd.choice([None, None, 1, 5])
    reserve = rnd.choice([1.0, 0.3, 0.01, 0.01])
    return Setup(rnd.random() < 0.6, rnd.random() < 0.85, chunk, reserve, *rnd.choice(POLICIES))


@fuzz(200)
@given(setups, worlds())
def test_outputs_equal_the_oracle(setup: Setup, world: World) -> None:
    setup.play_and_check(world)


@fuzz(120)
@given(st.integers(0, 1 << 30))
def test_outputs_equal_the_oracle_when_pages_are_short(seed: int) -> None:
    busy_setup(seed).play_and_check(busy_world(seed))


class FuzzingPolicy(SchedulerPolicy):
    """Asks for anything: in any order, twice, with any chunk, preempts what it likes. Only starving is in its power."""

    def __init__(self, ctx: SchedContext) -> None:
        self._rng = ctx.rng

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        rng = self._rng
        queue = [*v.waiting(), *v.prefilling()]
        rng.shuffle(queue)
        b.decode(rng.random() < 0.8)
        for r in queue[: rng.randrange(4)]:
            b.prefill(r, rng.choice([0, 1, 2, 5, UNBOUNDED]), rng.choice([0.0, 0.0, 0.5, 1.0]))
            if rng.random() < 0.2:
                b.preempt(r)
        if rng.random() < 0.2 and v.n_decode:
            victim = rng.choice(list(v.decoding()))
            b.preempt(victim)
            b.prefill(victim)
        if rng.random() < 0.1 and queue:
            b.prefill(queue[0])
        b.decode(rng.random() < 0.8)

    def victim(self, v: SchedView) -> ReqView | None:
        return self._rng.choice([*v.decoding(), *v.prefilling(), None])


@fuzz(120)
@given(st.integers(0, 1 << 30))
def test_a_policy_cannot_corrupt(seed: int) -> None:
    """N4, N2: whatever a policy asks for, no output is wrong; a request that it starves may be given up."""
    world = busy_world(seed)
    driver = busy_setup(seed).driver(world, FuzzingPolicy)
    driver.play()
    driver.check_end()
    given_up = 0
    for uid, end in driver.engine.ended.items():
        want, finish = expected(driver.admits[uid], world.room)
        got = driver.engine.tokens[uid]
        if end.finish in (Finish.ABORT, Finish.ERROR):
            given_up += end.finish is Finish.ERROR
            assert got == want[: len(got)]
            assert bool(end.detail) == (end.finish is Finish.ERROR)
        else:
            assert (got, end.finish) == (want, finish)
    event(f"given up: {given_up > 0}, preempted: {driver.engine.scheduler.counts()['preemptions'] > 0}")
