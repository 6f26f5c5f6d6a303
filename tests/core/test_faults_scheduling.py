"""Reported faults of schedulers and prefix caches, by id, on every step loop. What comes out is compared with an oracle that has
no engine, the device checks every KV entry it reads, and pages and rows are audited after every change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from minisgl.base.types import I32, Admit, Ended, Finish, Limits, SamplingSpec, StepPlan, StepResult
from minisgl.engine.loop import EngineOps, LoopContext, StepLoop, Ticket
from minisgl.engine.port import Abort
from minisgl.testing.sim_engine import MakeCache, SimEngine, build
from minisgl.testing.simulator import expected
from minisgl_plugins.cache.naive import NaiveCachePolicy
from minisgl_plugins.cache.radix import RadixCachePolicy
from minisgl_plugins.loop.overlap import OverlapLoop
from minisgl_plugins.loop.sync import SyncLoop
from minisgl_plugins.scheduler.chunked import ChunkedScheduler


class DeepLoop(StepLoop):
    """Up to four steps in flight, more than any bundled loop has."""

    depth = 4

    def __init__(self, ctx: LoopContext) -> None:
        super().__init__(ctx)
        self._flying: deque[Ticket] = deque()

    def turn(self, e: EngineOps) -> None:
        e.intake(block=e.idle)
        plan = e.schedule()
        if plan is not None:
            self._flying.append(e.submit(plan))
        if self._flying and (plan is None or len(self._flying) == self.depth):
            e.commit(e.collect(self._flying.popleft()))
        e.flush()


class Engine(SimEngine):
    """Its device runs a step when that is collected, after the next ones are planned: what a plan says must not change, and
    what it names must not be given away, until then."""

    def __init__(self, loop: type[StepLoop], limits: Limits, cache: MakeCache | None = None, **policy: Any) -> None:
        chosen = build(ChunkedScheduler, **policy)
        super().__init__(limits, cache or build(RadixCachePolicy), chosen, loop(LoopContext(None)))
        self._late: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> Ticket:
        self.validator.check(plan)
        self.plans.append(plan)
        self._late.append(plan)
        self._flying.append(plan.step)
        assert len(self._flying) <= self.loop.depth
        return Ticket(plan.step)

    def collect(self, t: Ticket) -> StepResult:
        assert self._flying[0] == t.step
        self._to_commit.append(self._flying.popleft())
        return self.device.run(self._late.popleft())

    def play(self, *admits: Admit) -> None:
        """All at once, to the end; outputs are the oracle's, and every page is free or evictable."""
        self.inbox.extend(admits)
        self.run()
        self.check(admits)

    def check(self, admits: Iterable[Admit]) -> None:
        room = min(self.limits.max_len, self.limits.num_pages * self.limits.page_size)
        for a in admits:
            assert (self.tokens[a.uid], self.ended[a.uid].finish) == expected(a, room), a.uid
        self.whole()

    def whole(self) -> None:
        counts = self.scheduler.counts()
        assert (counts["locked"], counts["held"]) == (0, 0)
        assert counts["free"] + counts["evictable"] == self.limits.num_pages


LOOPS = pytest.mark.parametrize("loop", [SyncLoop, OverlapLoop, DeepLoop], ids=["sync", "overlap", "four-deep"])
CACHES = pytest.mark.parametrize("cache", [RadixCachePolicy, NaiveCachePolicy], ids=["radix", "naive"])


def limits(pages: int = 64, page: int = 4, slots: int = 8, batch: int = 64, max_len: int = 4096) -> Limits:
    return Limits(slots, min(max_len, pages * page), pages, page, batch)


def text(n: int, salt: int = 0) -> I32:
    return ((np.arange(n) * 7 + salt * 13) % 91 + salt * 100).astype(np.int32)


def ask(uid: int, ids: I32, max_new: int, stop: tuple[int, ...] = (), seed: int | None = None) -> Admit:
    return Admit(uid, ids, SamplingSpec(max_new=max_new, stop_ids=stop, seed=seed))


def stops_after(uid: int, ids: I32, n: int) -> Admit:
    """A request that ends by EOS at its ``n``-th token or, if that comes up before, sooner."""
    token = expected(ask(uid, ids, n), 1 << 20)[0][-1]
    return ask(uid, ids, 60, (token,))


def spans(engine: Engine) -> Sequence[int]:
    return [span.n_new for plan in engine.plans for span in plan.spans]


@LOOPS
def test_m3_copies_of_a_long_prompt_for_two_tokens_each(loop: type[StepLoop]) -> None:
    """13 copies of "hello world " many times, then as many that share nothing: no plan is changed while its step has not run."""
    engine = Engine(loop, limits(pages=1200, page=16, slots=16, batch=256))
    hello = np.array([5, 6, 7] * 260, np.int32)
    engine.play(*[ask(uid, hello, 2) for uid in range(13)])
    engine.play(*[ask(uid, text(300, uid), 2) for uid in range(13, 26)])


@LOOPS
@CACHES
def test_m4_short_requests_that_end_by_eos_at_different_steps(loop: type[StepLoop], cache: type[Any]) -> None:
    """A row that stopped takes part in the steps launched meanwhile: its pages stay its own until they are done."""
    engine = Engine(loop, limits(pages=24), build(cache))
    engine.play(*[stops_after(uid, text(3 + uid % 5, uid), 1 + uid * 5 % 17) for uid in range(24)])
    assert {end.finish for end in engine.ended.values()} == {Finish.STOP}


@LOOPS
def test_m5_equal_prompts_prefilled_beside_each_other(loop: type[StepLoop]) -> None:
    """Each computes the last page of the cached prompt again, is repointed to the cached one, and gives its own back."""
    engine = Engine(loop, limits(pages=80))
    engine.play(*[ask(uid, text(32), 6 + uid) for uid in range(6)], *[ask(uid, text(32, 1), 9) for uid in range(6, 9)])
    engine.play(*[ask(uid, text(32), 5) for uid in range(9, 15)])
    assert engine.ended[9].cached_tokens == 28


@LOOPS
def test_m6_a_prefix_is_hit_while_the_pool_is_short(loop: type[StepLoop]) -> None:
    """Old prefixes fill the pool; what is evicted for the new rows is never what they lease."""
    engine = Engine(loop, limits(pages=20, slots=4))
    engine.play(*[ask(uid, text(20, uid), 1) for uid in range(4)])
    shared = text(16, 9)
    admits = [ask(10 + i, np.concatenate([shared, text(3 + i % 4, 20 + i)]), 8) for i in range(10)]
    engine.play(*admits)
    counts = engine.scheduler.counts()
    assert counts["cache_evicted_pages"] > 0
    assert counts["cached_tokens_total"] >= 16 * 5


@LOOPS
def test_m7_pages_of_16_tokens_are_evicted_one_for_one(loop: type[StepLoop]) -> None:
    """Four prompts of 4 pages fill the pool; one of 5 pages needs 5 of them, not 5 tokens and not 80 pages."""
    engine = Engine(loop, limits(pages=16, page=16))
    for uid in range(4):
        engine.play(ask(uid, text(64, uid), 1))
    assert engine.scheduler.counts()["evictable"] == 16
    engine.play(ask(9, text(79, 9), 1))
    assert 5 <= engine.scheduler.counts()["cache_evicted_pages"] <= 8


@LOOPS
def test_m8_a_prompts_buffer_is_used_again(loop: type[StepLoop]) -> None:
    engine, buffer = Engine(loop, limits()), text(20)
    engine.inbox.append(ask(1, buffer, 8))
    engine.turn()
    buffer[:] = 3
    engine.run()
    engine.play(ask(2, text(20), 8), ask(3, buffer, 8))
    assert (engine.ended[2].cached_tokens, engine.ended[3].cached_tokens) == (16, 0)
    assert engine.tokens[1] == engine.tokens[2]


@LOOPS
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_m9_chunks_before_the_last_give_no_token(loop: type[StepLoop], chunk: int) -> None:
    engine = Engine(loop, limits(), max_chunk=chunk)
    engine.play(ask(1, text(6), 30), ask(2, text(61, 1), 5), ask(3, text(40, 2), 5))
    sampled = [span for plan in engine.plans for span in plan.spans if span.sample]
    assert len(sampled) == 3


@LOOPS
@pytest.mark.parametrize(("pages", "page", "max_len"), [(7, 4, 31), (3, 1, 31), (5, 16, 50), (1, 16, 9)])
def test_m10_lengths_that_are_no_multiple_of_32(loop: type[StepLoop], pages: int, page: int, max_len: int) -> None:
    """A row ends where the smaller of pool and context ends, to the token."""
    engine = Engine(loop, limits(pages=pages, page=page, max_len=max_len))
    room = min(pages * page, max_len)
    engine.play(ask(1, text(2), 100), ask(2, text(room - 1, 1), 100))
    assert [len(engine.tokens[uid]) for uid in (1, 2)] == [room - 2, 1]


@LOOPS
def test_m15_more_prompts_than_fit_in_a_step(loop: type[StepLoop]) -> None:
    """Ids are unique, prompts count against the budget, and the last token of a length end comes."""
    engine = Engine(loop, limits(slots=4, batch=16))
    admits = [ask(uid, text(3 + uid * 7 % 20, uid), 1 + uid % 6) for uid in range(20)]
    engine.play(*admits)
    assert [len(engine.tokens[uid]) for uid in range(20)] == [1 + uid % 6 for uid in range(20)]
    assert max(plan.num_tokens for plan in engine.plans) == 16


@LOOPS
def test_n1_a_prompt_of_whole_blocks_many_times(loop: type[StepLoop]) -> None:
    """Blocks of 256: no query is empty when all of the prompt is cached."""
    engine = Engine(loop, limits(pages=24, page=256, batch=512))
    for round_ in range(3):
        engine.play(*[ask(10 * round_ + i, text(256 * (1 + i % 2)), 3) for i in range(4)])
    assert min(spans(engine)) > 0
    assert engine.ended[21].cached_tokens == 256


@LOOPS
def test_n2_n4_many_are_preempted_and_hit_the_cache_when_they_come_back(loop: type[StepLoop]) -> None:
    """What a row has emitted is told, not guessed; what is left to compute is counted after the match."""
    engine = Engine(loop, limits(pages=60, slots=32), reserve=0.05, max_chunk=6)
    admits = [ask(uid, text(5 + uid % 7, uid % 50), 12 + uid % 9, seed=uid) for uid in range(96)]
    engine.play(*admits)
    resumed = [init for plan in engine.plans for init in plan.init if init.emitted]
    assert engine.scheduler.counts()["preemptions"] > 10
    assert any(init.kv_len for init in resumed)
    lengths = {a.uid: len(a.ids) for a in admits}
    assert all(init.kv_len + len(init.ids) == lengths[init.uid] + init.emitted for init in resumed)
    assert min(spans(engine)) > 0


@LOOPS
@CACHES
def test_n3_a_pool_of_two_blocks_that_a_prompt_fills(loop: type[StepLoop], cache: type[Any]) -> None:
    engine = Engine(loop, limits(pages=2), build(cache))
    engine.play(ask(1, text(7), 9), ask(2, text(7, 1), 9), ask(3, text(2, 2), 9))
    assert [len(engine.tokens[uid]) for uid in (1, 2, 3)] == [1, 1, 6]
    engine.inbox.append(ask(4, text(8), 1))
    engine.run()
    assert "the prompt has 8 tokens; this server takes at most 7" in engine.refused[4].message


@LOOPS
@pytest.mark.parametrize("turns", [1, 2, 5, 20])
def test_s1_prompts_aborted_amid_their_chunks(loop: type[StepLoop], turns: int) -> None:
    """12 prompts in chunks, aborted after some turns with steps in flight: one end each, nothing of them cached or lost."""
    engine = Engine(loop, limits(pages=1100, slots=12, batch=128), max_chunk=16)
    engine.inbox.extend(ask(uid, text(390 - uid, uid), 4) for uid in range(12))
    for _ in range(turns):
        engine.turn()
    engine.inbox.append(Abort(tuple(range(12))))
    engine.inbox.append(Abort(tuple(range(12))))
    engine.run()
    assert [engine.ended[uid] for uid in range(12)] == [Ended(uid, Finish.ABORT, 390 - uid, 0, 0) for uid in range(12)]
    assert engine.scheduler.counts()["free"] == 1100
    engine.play(ask(20, text(390), 4))
    assert engine.ended[20].cached_tokens == 0


@LOOPS
def test_s2_prompts_shorter_than_a_page(loop: type[StepLoop]) -> None:
    engine = Engine(loop, limits(page=16))
    engine.play(*[ask(uid, text(1 + uid % 15), 1) for uid in range(30)])
    assert engine.scheduler.counts()["evictable"] == 0
    engine.play(*[ask(uid, text(uid), 16) for uid in range(31, 34)])


@LOOPS
def test_s3_pages_add_up_whenever_nothing_runs(loop: type[StepLoop]) -> None:
    engine = Engine(loop, limits(pages=24))
    for uid in range(0, 24, 3):
        engine.play(*[ask(uid + i, text(4 + 3 * (uid + i) % 19), 5) for i in range(3)])
    cached = engine.scheduler.counts()["evictable"]
    assert engine.scheduler.clear_cache() == cached > 0
    assert engine.scheduler.counts()["free"] == 24


@LOOPS
@CACHES
def test_s4_one_short_prompt_for_200_tokens_with_pages_of_one(loop: type[StepLoop], cache: type[Any]) -> None:
    """Ended by length and by EOS: what a step launched meanwhile took is given back once."""
    engine = Engine(loop, limits(pages=256, page=1), build(cache))
    engine.play(ask(1, text(5), 200))
    engine.play(stops_after(2, text(5, 1), 40))
    assert engine.ended[2].finish is Finish.STOP


@LOOPS
def test_s5_prompts_in_several_steps_in_flight_keep_their_tokens(loop: type[StepLoop]) -> None:
    """As many short prompts begin in each step as fit: every one goes on from its own first token, which no host has seen."""
    engine = Engine(loop, limits(pages=200, slots=48, batch=64))
    engine.play(*[ask(uid, text(2 + uid % 9, uid), 2 + uid % 5, seed=uid) for uid in range(120)])
    assert max(len(plan.spans) for plan in engine.plans) >= 8


@LOOPS
@pytest.mark.parametrize("tile", [None, 64, 4096])
def test_s6_a_chunk_and_a_tile_that_do_not_fit_the_prompt_make_progress(loop: type[StepLoop], tile: int | None) -> None:
    """129 tokens with chunks of 128; a tile larger than a step is one that no step can fill."""
    engine = Engine(loop, limits(pages=200, batch=136), max_chunk=128, tile_tokens=tile)
    engine.play(*[ask(uid, text(129, uid), 3) for uid in range(3)], ask(3, text(1, 9), 5))
    assert len(engine.plans) < 40


@LOOPS
def test_s7_long_contexts_in_a_full_pool_do_not_thrash(loop: type[StepLoop]) -> None:
    """Nothing is cached. With the whole context promised nobody is preempted; with less, what is computed stays near what is
    needed: a request comes back only when it fits, not chunk by chunk."""
    admits = [ask(uid, text(60 + 5 * uid, uid), 40) for uid in range(6)]
    needed = sum(len(a.ids) + 39 for a in admits)
    for reserve, most in ((1.0, needed), (0.05, 2 * needed)):
        engine = Engine(loop, limits(pages=48), build(NaiveCachePolicy), reserve=reserve, max_chunk=8)
        engine.play(*admits)
        assert (engine.scheduler.counts()["preemptions"] > 0) == (reserve < 1)
        assert needed <= engine.device.tokens_computed <= most


def test_s8_what_depends_on_a_rows_history_is_the_same_on_every_loop() -> None:
    """Each token depends on all before it, the seed and how many were emitted, also across preemptions and stops."""
    admits = [
        stops_after(uid, text(4 + uid, uid), 9) if uid % 3 == 0 else ask(uid, text(4 + uid, uid), 14, seed=uid)
        for uid in range(18)
    ]
    found = []
    for loop in (SyncLoop, OverlapLoop, DeepLoop):
        engine = Engine(loop, limits(pages=26), reserve=0.05)
        engine.play(*admits)
        assert engine.scheduler.counts()["preemptions"] > 0
        found.append(engine.tokens)
    assert found[0] == found[1] == found[2]
