"""Random histories of requests against an oracle that has no engine, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from minisgl.base.types import Admit, Finish, Limits, SamplingSpec
from minisgl.engine.loop import LoopContext
from minisgl.engine.port import Abort
from minisgl.sched.policy import UNBOUNDED, ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder
from minisgl.testing.sim_engine import SimEngine, build
from minisgl.testing.simulator import VOCAB, expected
from minisgl_plugins.cache.naive import NaiveCachePolicy
from minisgl_plugins.cache.radix import RadixCachePolicy
from minisgl_plugins.loop.overlap import OverlapLoop
from minisgl_plugins.loop.sync import SyncLoop
from minisgl_plugins.scheduler.chunked import ChunkedScheduler

BASES = np.random.default_rng(7).integers(0, VOCAB, (3, 512)).astype(np.int32)


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@dataclass(frozen=True)
class Arrival:
    """A request: the first ``prefix`` tokens of a base text, and ``tail`` others. ``follows``: it continues the output of
    that earlier request instead, if that has any. ``wait``: turns since the arrival before. ``abort``: turns it may live."""

    wait: int
    base: int
    prefix: int
    tail: int
    max_new: int
    stops: int
    follows: int | None
    abort: int | None
    namespace: bytes
    priority: int
    owner: int


@dataclass(frozen=True)
class World:
    limits: Limits
    overlap: bool
    radix: bool
    max_chunk: int | None
    reserve: float
    flush_at: int
    arrivals: tuple[Arrival, ...]

    @property
    def room(self) -> int:
        return min(self.limits.max_len, self.limits.num_pages * self.limits.page_size)


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
        overlap=draw(st.booleans()),
        radix=draw(st.sampled_from([True, True, True, False])),
        max_chunk=draw(st.sampled_from([None, None, 1, 7, 512])),
        reserve=draw(st.sampled_from([1.0, 1.0, 0.4, 0.01])),
        flush_at=draw(st.sampled_from([-1, 5, 25])),
        arrivals=tuple(draw(arrivals(16, lim.page_size, min(lim.max_len, lim.num_pages * lim.page_size)))),
    )


def busy_world(seed: int) -> World:
    """Many requests at once in a pool that is too small for them, with long outputs and common prefixes."""
    rnd = Random(seed)
    page_size = rnd.choice([1, 2, 4, 4, 16])
    pages = max(8, rnd.choice([48, 96, 160, 320]) // page_size)
    slots = rnd.choice([3, 5, 8])
    room = min(200, pages * page_size)
    busy = tuple(
        Arrival(
            wait=rnd.choice([0, 0, 0, 1, 4]),
            base=rnd.randrange(2),
            prefix=rnd.choice([rnd.randrange(1, room // 2), page_size * rnd.randrange(1, 4), room // 3]),
            tail=rnd.randrange(3),
            max_new=rnd.choice([1, 4, 15, 40]),
            stops=rnd.choice([0, 0, 2, 10]),
            follows=rnd.choice([None, rnd.randrange(24)]),
            abort=rnd.choice([None, None, None, None, rnd.randrange(25)]),
            namespace=rnd.choice([b"", b"", b"", b"salt"]),
            priority=rnd.choice([0, 0, 1]),
            owner=rnd.randrange(2),
        )
        for _ in range(rnd.randrange(8, 24))
    )
    return World(
        limits=Limits(slots, 200, pages, page_size, slots + rnd.choice([1, 7, 40, 300]), rnd.choice([1, 1, 3])),
        overlap=rnd.random() < 0.6,
        radix=rnd.random() < 0.85,
        max_chunk=rnd.choice([None, None, 1, 5]),
        reserve=rnd.choice([1.0, 0.3, 0.01, 0.01]),
        flush_at=rnd.choice([-1, 20]),
        arrivals=busy,
    )


class Driver:
    """Plays a world's arrivals and aborts into an engine, turn by turn."""

    def __init__(self, world: World, policy: type[SchedulerPolicy] | None = None) -> None:
        self.world = world
        chunked = build(ChunkedScheduler, reserve=world.reserve, max_chunk=world.max_chunk)
        self.engine = SimEngine(
            world.limits,
            build(RadixCachePolicy if world.radix else NaiveCachePolicy),
            build(policy) if policy is not None else chunked,
            (OverlapLoop if world.overlap else SyncLoop)(LoopContext(None)),
        )
        self.admits: dict[int, Admit] = {}
        self.aborted: set[int] = set()
        self._aborts: list[tuple[int, int]] = []

    def play(self, turns: int = 20_000) -> None:
        todo = list(enumerate(self.world.arrivals))
        due = todo[0][1].wait if todo else 0
        for turn in range(turns):
            while todo and due <= turn:
                uid, a = todo.pop(0)
                self._arrive(uid, a, turn)
                due = turn + (todo[0][1].wait if todo else 0)
            self._abort(turn)
            if turn == self.world.flush_at:
                self.engine.scheduler.clear_cache()
            if not todo and self.engine.idle and not self.engine.inbox:
                return
            self.engine.turn()
        raise AssertionError(f"not done: {dict(self.engine.scheduler.counts())}")

    def _arrive(self, uid: int, a: Arrival, turn: int) -> None:
        ids = BASES[a.base, : a.prefix]
        if a.follows is not None and self.engine.tokens.get(a.follows):
            ids = np.concatenate([self.admits[a.follows].ids, np.array(self.engine.tokens[a.follows], np.int32)])
        ids = np.concatenate([ids, (BASES[a.base, 500 - uid * 7 :][: a.tail] + uid) % VOCAB]).astype(np.int32)
        sampling = SamplingSpec(max_new=a.max_new, stop_ids=tuple(range(a.stops)), seed=uid % 3)
        buffer = ids.copy()
        self.admits[uid] = Admit(uid, ids, sampling, a.owner, a.priority, a.namespace)
        self.engine.inbox.append(Admit(uid, buffer, sampling, a.owner, a.priority, a.namespace))
        if a.abort is not None:
            self._aborts.append((turn + a.abort, uid))

    def _abort(self, turn: int) -> None:
        for when, uid in self._aborts:
            if when == turn and uid not in self.engine.ended:
                self.aborted.add(uid)
                self.engine.inbox.append(Abort((uid, uid, 999)))

    def check_end(self) -> None:
        """Everything came back, and every request is accounted for."""
        s, lim = self.engine.scheduler, self.world.limits
        counts = s.counts()
        assert s.idle
        assert counts["held"] == counts["locked"] == 0
        assert counts["free"] + counts["evictable"] == lim.num_pages
        assert self.engine.ended.keys() | self.engine.refused.keys() == self.admits.keys()
        assert not self.engine.ended.keys() & self.engine.refused.keys()
        assert s.clear_cache() == counts["evictable"]
        for uid, a in self.admits.items():
            assert (uid in self.engine.refused) == (not 0 < len(a.ids) < self.world.room)

    def check_outputs(self) -> None:
        """Each request has exactly the oracle's tokens; an aborted one their beginning."""
        for uid, end in self.engine.ended.items():
            want, finish = expected(self.admits[uid], self.world.room)
            got = self.engine.tokens[uid]
            assert end.output_tokens == len(got)
            assert end.prompt_tokens == len(self.admits[uid].ids)
            assert end.cached_tokens < end.prompt_tokens
            assert end.cached_tokens % self.world.limits.page_size == 0
            if end.finish is Finish.ABORT:
                assert uid in self.aborted
                assert got == want[: len(got)]
            else:
                assert (got, end.finish) == (want, finish)


def play_and_check(world: World) -> None:
    driver = Driver(world)
    driver.play()
    driver.check_end()
    driver.check_outputs()
    counts = driver.engine.scheduler.counts()
    event(f"preempted: {counts['preemptions'] > 0}, cached: {counts['cached_tokens_total'] > 0}")
    if world.reserve == 1.0:
        assert counts["preemptions"] == 0, "what is admitted with its whole context never lacks a page"


@fuzz(200)
@given(worlds())
def test_outputs_equal_the_oracle(world: World) -> None:
    play_and_check(world)


@fuzz(120)
@given(st.integers(0, 1 << 30))
def test_outputs_equal_the_oracle_when_pages_are_short(seed: int) -> None:
    play_and_check(busy_world(seed))


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
    driver = Driver(world, FuzzingPolicy)
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
