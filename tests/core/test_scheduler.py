"""Rules of the scheduler, one by one, on a simulated device that checks every read. Ids such as M5 name reported faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from minisgl.base.errors import CacheError, ConfigError
from minisgl.base.types import (
    I32,
    Admit,
    Ended,
    Finish,
    Limits,
    Refused,
    ReqState,
    SamplingSpec,
    StepPlan,
    StepResult,
    Tokens,
)
from minisgl.engine.loop import LoopContext, StepLoop
from minisgl.engine.port import Abort
from minisgl.sched.builder import Builder
from minisgl.sched.cache import Inserted, Lease
from minisgl.sched.policy import Deny, ReqView, SchedContext, SchedulerPolicy, SchedView, StepBuilder
from minisgl.sched.request import Req
from minisgl.sched.rows import Rows
from minisgl.testing.calls import counted
from minisgl.testing.sim_engine import MakeCache, MakePolicy, SimEngine, build, check_types
from minisgl.testing.simulator import expected
from minisgl_plugins.cache.naive import NaiveCachePolicy
from minisgl_plugins.cache.radix import RadixCachePolicy
from minisgl_plugins.loop.overlap import OverlapLoop
from minisgl_plugins.loop.sync import SyncLoop
from minisgl_plugins.scheduler.chunked import ChunkedScheduler

PAGE = 4


def ints(values: Iterable[int]) -> I32:
    return np.array(list(values), np.int32)


def ask(uid: int, prompt: int | I32, max_new: int = 8, **more: object) -> Admit:
    """A request whose prompt is the first ``prompt`` of one text, or given; it ends by length."""
    ids = ints(range(prompt)) if isinstance(prompt, int) else prompt
    stop_ids = more.pop("stop_ids", ())
    return Admit(uid, ids, SamplingSpec(max_new=max_new, stop_ids=stop_ids), **more)  # type: ignore[arg-type]


class Lab(SimEngine):
    """An engine whose steps can be taken one by one, with as many in flight as wanted."""

    def __init__(
        self,
        cache: MakeCache | None = None,
        policy: MakePolicy | None = None,
        loop: type[StepLoop] = SyncLoop,
        slots: int = 4,
        max_len: int = 256,
        pages: int = 64,
        page_size: int = PAGE,
        batch: int = 64,
        grow: int = 1,
    ) -> None:
        super().__init__(
            Limits(slots, max_len, pages, page_size, batch, grow),
            cache or build(RadixCachePolicy),
            policy or build(ChunkedScheduler),
            loop(LoopContext(None)),
        )
        self.pending: list[StepResult] = []
        self.pages = self.scheduler.residency.ledger

    def give(self, *admits: Admit) -> None:
        self.inbox.extend(admits)
        self.intake(block=False)

    def launch(self) -> StepPlan | None:
        """Plan and run a step; its result stays in flight."""
        plan = self.schedule()
        if plan is not None:
            self.validator.check(plan)
            check_types(plan)
            self.plans.append(plan)
            self.pending.append(self.device.run(plan))
        return plan

    def land(self) -> None:
        """Commit the oldest step in flight."""
        self._to_commit.append(self.pending[0].step)
        self.commit(self.pending.pop(0))
        self.flush()

    def step(self) -> StepPlan:
        plan = self.launch()
        assert plan is not None
        self.land()
        return plan

    def finish(self) -> None:
        """Run all to the end and compare with the oracle."""
        for _ in range(2000):
            if self.launch() is None and not self.pending:
                break
            if self.pending:
                self.land()
        assert self.scheduler.idle

    def count(self, what: str) -> int:
        return self.scheduler.counts()[what]

    def check(self, *admits: Admit) -> None:
        for a in admits:
            room = min(self.limits.max_len, self.limits.num_pages * self.limits.page_size)
            assert (self.tokens[a.uid], self.ended[a.uid].finish) == expected(a, room)


class Told(SchedulerPolicy):
    """Does in each pass what the test says."""

    def __init__(self, ctx: SchedContext) -> None:
        self.tell: Callable[[SchedView, StepBuilder], object] = lambda v, b: None

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        self.tell(v, b)


def tell(lab: Lab, what: Callable[[SchedView, StepBuilder], object]) -> None:
    assert isinstance(lab.policy, Told)
    lab.policy.tell = what


# ------------------------------------------------------------------------------------------------------------- admission


def test_a_prompt_without_tokens_is_refused() -> None:
    lab = Lab()
    lab.give(ask(1, 0))
    message = "the prompt has no tokens; at least 1 is needed"
    assert lab.refused[1] == Refused(1, 400, message, "invalid_value", "prompt")
    assert lab.scheduler.idle


def test_a_request_for_no_token_is_refused() -> None:
    refused = Lab().scheduler.admit(ask(1, 5, max_new=0))
    assert refused == Refused(1, 400, "max_new = 0; at least 1 is needed", "invalid_value")


def test_an_overlong_prompt_is_refused_with_both_numbers() -> None:
    lab = Lab(max_len=40)
    lab.give(ask(1, 40), ask(2, 39))
    message = "the prompt has 40 tokens; this server takes at most 39"
    assert lab.refused[1] == Refused(1, 400, message, "context_length_exceeded", "prompt")
    assert 2 not in lab.refused


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    lab = Lab(max_len=256, pages=5)
    lab.give(ask(1, 20))
    message = "the prompt has 20 tokens; this server takes at most 19 (its KV cache holds 20 tokens)"
    assert lab.refused[1].message == message


def test_a_running_uid_is_refused_and_the_first_goes_on() -> None:
    """M15: ids are unique."""
    lab, a = Lab(), ask(1, 9)
    lab.give(a, ask(1, 5))
    assert lab.refused[1] == Refused(1, 400, "request 1 is running already; a request id is used once")
    lab.finish()
    lab.check(a)


@pytest.mark.parametrize("field", ["max_slots", "max_len", "num_pages", "page_size", "batch_tokens", "grow_pages"])
def test_impossible_limits_are_refused_at_the_start(field: str) -> None:
    """S6."""
    names = ("max_slots", "max_len", "num_pages", "page_size", "batch_tokens", "grow_pages")
    limits = dict.fromkeys(names, 8) | {field: 0}
    with pytest.raises(ConfigError, match=f"{field} = 0 is not possible; it must be at least 1"):
        SimEngine(Limits(**limits), build(RadixCachePolicy), build(ChunkedScheduler), SyncLoop(LoopContext(None)))


def test_a_step_too_small_for_its_rows_is_refused_at_the_start() -> None:
    """S6."""
    with pytest.raises(ConfigError, match="batch_tokens = 3 is less than the 4 requests that may run at once"):
        Lab(slots=4, batch=3)


def test_output_is_cut_to_what_the_context_leaves() -> None:
    lab, a = Lab(max_len=20), ask(1, 15, max_new=100)
    lab.give(a)
    lab.finish()
    assert len(lab.tokens[1]) == 5
    assert lab.ended[1] == Ended(1, Finish.LENGTH, 15, 5, 0)
    lab.check(a)


def test_the_prompt_is_copied_at_admission() -> None:
    """M8."""
    lab, buffer = Lab(), ints(range(9))
    lab.give(Admit(1, buffer, SamplingSpec(max_new=3)))
    buffer[:] = 0
    lab.finish()
    lab.check(ask(1, 9, max_new=3))


def test_what_a_policy_sees_of_a_prompt_is_int32_and_read_only() -> None:
    """Also after a preemption, when it includes what was emitted."""
    lab = Lab()
    lab.give(Admit(1, np.arange(9), SamplingSpec(max_new=8)))  # type: ignore[arg-type]
    [r] = lab.scheduler.view.waiting()
    lab.step()
    lab.step()
    for n in (9, 11):
        assert (r.ids.dtype, len(r.ids)) == (np.int32, n)
        with pytest.raises(ValueError, match="read-only"):
            r.ids[0] = 1
        assert Builder(lab.scheduler).preempt(r) == (n == 9)
    lab.finish()
    lab.check(ask(1, 9))


# --------------------------------------------------------------------------------------------------------------- chunks


def test_prompt_tokens_count_against_the_budget_of_a_step() -> None:
    """M15."""
    lab = Lab(batch=10)
    lab.give(ask(1, 7), ask(2, ints(range(50, 58))), ask(3, ints(range(80, 85))))
    assert [s.n_new for s in lab.step().spans] == [7, 3]
    plan = lab.step()
    assert (plan.n_decode, [s.n_new for s in plan.spans], plan.num_tokens) == (1, [5, 4], 10)


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    """M9, I8."""
    lab, a = Lab(batch=4), ask(1, 10, max_new=2)
    lab.give(a)
    spans = [lab.step().spans[0] for _ in range(3)]
    assert [(s.n_new, s.sample) for s in spans] == [(4, False), (4, False), (2, True)]
    assert len(lab.tokens[1]) == 1
    lab.finish()
    lab.check(a)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_output_does_not_depend_on_the_chunk_size(chunk: int) -> None:
    lab = Lab(policy=build(ChunkedScheduler, max_chunk=chunk), batch=520, pages=80)
    admits = [ask(uid, ints(range(uid, uid + 60))) for uid in range(3)]
    lab.give(*admits)
    lab.finish()
    lab.check(*admits)
    assert max(s.n_new for p in lab.plans for s in p.spans) == min(chunk, 60)


def test_decode_goes_on_beside_a_long_prefill() -> None:
    lab = Lab(batch=8)
    lab.give(ask(1, 4, max_new=20))
    lab.step()
    lab.give(ask(2, ints(range(100, 160)), max_new=2))
    for _ in range(5):
        plan = lab.step()
        assert (plan.n_decode, plan.num_tokens) == (1, 8)


def test_higher_priority_is_admitted_first() -> None:
    lab = Lab(slots=1)
    lab.give(ask(1, 5, 2, priority=0), ask(2, ints([9] * 5), 2, priority=5), ask(3, ints([8] * 5), 2, priority=5))
    lab.finish()
    assert list(lab.ended) == [2, 3, 1]


def test_a_settings_value_out_of_range_is_refused() -> None:
    for bad in ({"reserve": 0.0}, {"reserve": 1.5}, {"max_chunk": 0}, {"chunk": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ChunkedScheduler.Settings(**bad)


# ---------------------------------------------------------------------------------------------------------- prefix cache


def test_a_request_hits_the_prompt_of_one_that_still_decodes() -> None:
    """The full pages of a prompt are cached when its last chunk is planned, not when the request ends."""
    lab = Lab()
    lab.give(ask(1, 18, max_new=20))
    lab.step()
    assert (lab.count("locked"), lab.count("evictable")) == (4, 0)
    lab.give(ask(2, 18, max_new=2))
    plan = lab.step()
    assert (plan.init[0].kv_len, plan.spans[0].n_new) == (16, 2)
    lab.finish()
    assert lab.ended[2].cached_tokens == 16
    assert lab.ended[1].cached_tokens == 0


def test_a_request_may_hit_a_prompt_whose_step_is_still_in_flight() -> None:
    """Steps run in order, so what an earlier step writes a later one may read."""
    lab, a, b = Lab(), ask(1, 18), ask(2, 18)
    lab.give(a)
    lab.launch()
    lab.give(b)
    plan = lab.launch()
    assert plan is not None
    assert plan.init[0].kv_len == 16
    lab.finish()
    lab.check(a, b)


@pytest.mark.parametrize("prompt", [4, 8, 32])
def test_a_prompt_that_is_cached_whole_computes_its_last_page_again(prompt: int) -> None:
    """N1, I7: no empty query when the prompt is a multiple of the page size."""
    lab, a, b = Lab(), ask(1, prompt), ask(2, prompt)
    lab.give(a)
    lab.finish()
    lab.give(b)
    plan = lab.step()
    assert (plan.init[0].kv_len, plan.spans[0].n_new) == (prompt - PAGE, PAGE)
    lab.finish()
    lab.check(a, b)


def test_a_second_copy_of_a_page_is_repointed_then_freed_behind_its_step() -> None:
    """M5, I5: the row reads the cache's page from the next plan on; its own is free when the step that wrote it is done."""
    lab, a, b = Lab(), ask(1, 8, max_new=12), ask(2, 8, max_new=12)
    lab.give(a)
    first = lab.step()
    lab.give(b)
    second = lab.launch()  # computes page 1 again, into a page of its own
    assert second is not None
    own, shared = int(second.init[0].pages[1]), int(first.init[0].pages[1])
    assert own != shared
    assert lab.pages.held_pages().tolist() == [own]
    third = lab.launch()
    assert third is not None
    writes = list(zip(third.grow_slot.tolist(), third.grow_at.tolist(), third.grow_page.tolist()))
    assert (second.init[0].slot, 1, shared) in writes
    assert own not in [page for _, _, page in writes]
    lab.land()
    assert lab.pages.held == 0
    assert own in lab.pages.free_pages()
    lab.finish()
    lab.check(a, b)


def test_a_prompt_shorter_than_a_page_is_not_cached() -> None:
    """S2."""
    lab = Lab(page_size=16)
    admits = [ask(uid, 5, max_new=3) for uid in range(3)]
    lab.give(*admits)
    lab.finish()
    assert lab.count("evictable") == 0
    assert lab.count("free") == 64
    lab.check(*admits)


def test_generated_text_is_cached_when_a_request_ends() -> None:
    """The next turn of a conversation finds it; the KV of the last token is not there yet and is not counted."""
    lab, a = Lab(), ask(1, 6, max_new=11)
    lab.give(a)
    lab.finish()
    follow = np.concatenate([a.ids, ints(lab.tokens[1]), ints([5])])
    b = ask(2, follow)
    lab.give(b)
    lab.finish()
    assert lab.ended[2].cached_tokens == 16  # 6 + 11 - 1 tokens have KV: four pages
    lab.check(a, b)


def test_namespaces_do_not_share_pages() -> None:
    lab = Lab()
    lab.give(ask(1, 18, namespace=b"a"))
    lab.finish()
    lab.give(ask(2, 18, namespace=b"b"), ask(3, 18, namespace=b"a"))
    lab.finish()
    assert (lab.ended[2].cached_tokens, lab.ended[3].cached_tokens) == (0, 16)


def test_clearing_the_cache_frees_what_no_row_uses() -> None:
    lab = Lab()
    lab.give(ask(1, 16))
    lab.finish()
    cached = lab.count("evictable")
    lab.give(ask(2, ints(range(50, 66))))
    lab.step()
    locked = lab.count("locked")
    assert (cached, locked) == (5, 4)
    assert lab.scheduler.clear_cache() == cached
    assert (lab.count("evictable"), lab.count("locked")) == (0, locked)
    lab.finish()


def test_free_evictable_and_locked_pages_add_up_when_idle() -> None:
    """S3."""
    lab = Lab(pages=24)
    for uid in range(12):
        lab.give(ask(uid, 4 + 3 * uid % 19, max_new=5))
        lab.finish()
        assert lab.count("free") + lab.count("evictable") == 24
        assert lab.count("locked") == lab.count("held") == 0


# ------------------------------------------------------------------------------------------------- waiting for a prefill


def test_equal_prompts_are_prefilled_once() -> None:
    """n > 1: the others wait for the first and then compute their last page alone."""
    lab, text = Lab(), ints(range(50, 80))
    admits = [ask(uid, 30) for uid in range(4)] + [ask(uid, text) for uid in range(4, 8)]
    for some in (admits[:4], admits[4:]):
        lab.give(*some)
        assert [s.n_new for s in lab.step().spans] == [30]
        assert [s.n_new for s in lab.step().spans] == [2, 2, 2]
        lab.finish()
    lab.check(*admits)
    assert lab.count("cached_tokens_total") == 2 * 3 * 28


def test_a_request_waits_as_long_as_the_shared_prompt_is_prefilled() -> None:
    lab = Lab(policy=build(ChunkedScheduler, max_chunk=8))
    a, b = ask(1, 30), ask(2, np.concatenate([ints(range(8)), ints([90] * 8)]))
    lab.give(a, b)
    for _ in range(4):
        assert len(lab.step().spans) == 1
        assert lab.scheduler.n_waiting == 1
    plan = lab.step()
    assert plan.init[0].kv_len == 8
    lab.finish()
    lab.check(a, b)


def test_a_request_waits_for_one_page_that_it_shares() -> None:
    """The first of all, and the one that ends a token before the prompt does."""
    lab = Lab()
    lab.give(ask(1, 9), ask(2, np.concatenate([ints(range(4)), ints([90] * 8)])))
    assert [init.uid for init in lab.step().init] == [1]
    lab.finish()
    lab = Lab()
    lab.give(ask(9, 5))
    lab.finish()
    lab.give(ask(1, 9), ask(2, 9))
    assert [init.uid for init in lab.step().init] == [1]
    lab.finish()


def test_an_unrelated_request_does_not_wait() -> None:
    """Neither one whose shared page is cached, nor one that would compute the shared page again anyway."""
    lab = Lab(policy=build(ChunkedScheduler, max_chunk=8))
    lab.give(ask(9, 5))
    lab.finish()
    lab.give(ask(1, 30))
    less = ask(2, np.concatenate([ints(range(7)), ints([90] * 8)]))  # page 0 is cached, page 1 differs
    short = ask(4, 8)  # its last page is its second
    lab.give(less, short)
    assert [init.uid for init in lab.step().init] == [1, 2, 4]
    lab.finish()


def test_a_request_of_another_namespace_does_not_wait() -> None:
    lab, admits = Lab(), [ask(1, 30), ask(2, 30, namespace=b"b"), ask(3, 30, namespace=b"b")]
    lab.give(*admits)
    assert [init.uid for init in lab.step().init] == [1, 2]
    assert [init.uid for init in lab.step().init] == [3]
    lab.finish()
    lab.check(*admits)


def test_the_waiting_go_on_when_the_prefill_they_wait_for_is_aborted() -> None:
    lab = Lab(policy=build(ChunkedScheduler, max_chunk=8))
    admits = [ask(uid, 30) for uid in range(3)]
    lab.give(*admits)
    lab.step()
    lab.scheduler.abort(0)
    plan = lab.step()
    assert [init.uid for init in plan.init] == [1]
    assert lab.scheduler.n_waiting == 1  # the third now waits for the second
    lab.finish()
    lab.check(*admits[1:])


def test_a_denied_request_costs_no_lookup_while_it_waits() -> None:
    class Counting(RadixCachePolicy):
        calls = 0

        def match(self, tokens: I32, namespace: bytes) -> int:
            self.calls += 1
            return super().match(tokens, namespace)

        def lease(self, tokens: I32, namespace: bytes) -> Lease:
            self.calls += 1
            return super().lease(tokens, namespace)

    lab = Lab(cache=build(Counting), policy=build(ChunkedScheduler, max_chunk=4), slots=60)
    lab.give(*(ask(uid, 60) for uid in range(50)))
    assert isinstance(lab.cache, Counting)
    lab.step()
    first = lab.cache.calls
    for _ in range(12):
        assert len(lab.step().spans) == 1
    assert lab.cache.calls == first
    assert first <= 2 * 50 + 1


def test_what_a_policy_asks_is_looked_up_once_until_the_cache_changes() -> None:
    """Neither an insert nor what is given up is missed, nor both together."""

    class Counting(RadixCachePolicy):
        matches = inserts = 0

        def match(self, tokens: I32, namespace: bytes) -> int:
            self.matches += 1
            return super().match(tokens, namespace)

        def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
            self.inserts += 1
            return super().insert(tokens, pages, lease, namespace)

    lab = Lab(cache=build(Counting), policy=build(Told))
    cache = lab.cache
    assert isinstance(cache, Counting)
    lab.give(ask(0, 17))
    [waits] = lab.scheduler.view.waiting()
    seen = []

    def look() -> None:
        before = cache.matches
        seen.append([lab.scheduler.view.cached(waits) for _ in range(3)][-1])
        assert cache.matches == before + 1

    def run(uid: int, prompt: int) -> None:
        lab.give(ask(uid, prompt, max_new=2))
        [*_, r] = lab.scheduler.view.waiting()
        tell(lab, lambda v, b: b.prefill(r))
        lab.step()
        lab.step()

    look()
    run(1, 5)
    look()
    assert lab.scheduler.clear_cache() == 1
    look()
    run(2, 9)
    look()
    run(3, 13)
    assert lab.scheduler.clear_cache() == 3
    look()
    run(4, 5)
    look()
    assert lab.scheduler.clear_cache() == 1
    look()
    assert seen == [0, 4, 0, 8, 0, 4, 0]
    assert cache.inserts == 4, "the second token of each fills no page"


def test_a_change_of_the_cache_is_noticed_however_it_came_about() -> None:
    """One insert and one eviction between two looks."""
    lab = Lab(pages=8, policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting() if r.uid != 9])
    lab.give(ask(1, ints([5] * 8), max_new=1))
    lab.step()
    lab.give(ask(9, 9), ask(2, 8, max_new=1))
    waits = next(r for r in lab.scheduler.view.waiting() if r.uid == 9)
    assert lab.scheduler.view.cached(waits) == 0
    lab.step()
    assert lab.pages.free == 4
    assert lab.pages.take(5) is not None
    assert lab.scheduler.view.cached(waits) == 8


# --------------------------------------------------------------------------------------------------------------- builder


def test_the_budget_shrinks_with_what_is_granted_and_with_the_rows_that_decode() -> None:
    lab = Lab(batch=20, policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    lab.give(ask(1, 5), ask(2, ints([7] * 5)))
    lab.step()
    lab.give(ask(3, ints([8] * 40)), ask(4, ints([9] * 40)))
    budgets = []

    def plan(v: SchedView, b: StepBuilder) -> None:
        c, d = v.waiting()
        budgets.append(b.budget)
        b.decode(False)
        budgets.append(b.budget)
        assert b.prefill(c, 3).tokens == 3
        budgets.append(b.budget)
        b.decode(True)
        budgets.append(b.budget)
        assert b.prefill(d, 0).deny is Deny.BUDGET
        assert b.prefill(d).tokens == 15
        budgets.append(b.budget)
        b.decode(False)
        b.decode()  # exactly enough is left
        budgets.append(b.budget)

    tell(lab, plan)
    built = lab.step()
    assert budgets == [18, 20, 17, 15, 0, 0]
    assert (built.n_decode, [s.n_new for s in built.spans]) == (2, [3, 15])


def test_decode_rows_take_part_only_if_the_budget_has_a_token_for_each() -> None:
    lab = Lab(batch=20, policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    lab.give(ask(1, 5), ask(2, ints([7] * 5)))
    lab.step()
    lab.give(ask(3, ints([8] * 60)))

    def plan(v: SchedView, b: StepBuilder) -> None:
        b.decode(False)
        for r in [*v.waiting(), *v.prefilling()]:
            assert b.prefill(r, 19).tokens == 19
        b.decode(True)
        assert b.budget == 1

    tell(lab, plan)
    for _ in range(2):
        built = lab.step()
        assert (built.n_decode, built.num_tokens) == (0, 19)


def test_without_a_reserve_only_known_tokens_must_fit() -> None:
    """Two prompts of 2 pages each in 4 pages; what they will generate is not asked for."""
    lab = Lab(pages=4, policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    lab.give(ask(1, 8), ask(2, ints([7] * 8)))
    assert len(lab.step().spans) == 2


def test_the_reserve_counts_all_kv_of_the_output_to_the_token() -> None:
    """8 + 10 - 1 tokens have KV: 5 pages each."""
    for pages, running in ((9, 1), (10, 2)):
        lab = Lab(pages=pages)
        lab.give(ask(1, 8, max_new=10), ask(2, ints([7] * 8), max_new=10))
        lab.step()
        assert lab.scheduler.n_running == running
        lab.finish()
        assert lab.count("preemptions") == 0


def test_a_request_that_cannot_fit_now_is_not_leased() -> None:
    """Its prefix does not count as used before it is."""
    lab = Lab(pages=5)
    lab.give(ask(1, 8, max_new=9), ask(2, ints([7] * 8), max_new=9))
    lab.step()
    lab.step()
    assert lab.count("cache_queries") == 1
    lab.finish()


def test_a_chunk_without_pages_is_denied_and_taken_up_later() -> None:
    lab = Lab(pages=6, cache=build(NaiveCachePolicy), policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r, 4) for r in v.waiting()])
    a, b = ask(1, 4, max_new=17), ask(2, ints([7] * 16), max_new=2)
    lab.give(a, b)
    lab.step()
    while lab.count("free"):
        lab.step()
    denied = []
    tell(lab, lambda v, b: denied.extend(b.prefill(r).deny for r in v.prefilling()))
    lab.launch()
    assert denied == [Deny.PAGES]
    lab.land()
    lab.finish()
    lab.check(a, b)


def test_the_pages_that_running_rows_need_are_counted_row_by_row() -> None:
    """In pages of 4, with 3 at a time. A row that has more than it needs now does not lend to others; an ended one needs none."""
    lab = Lab(grow=3, batch=32, cache=build(NaiveCachePolicy), policy=build(ChunkedScheduler, max_chunk=9))
    lab.give(ask(1, 8, max_new=20), ask(2, ints([7] * 30), max_new=5), ask(3, ints([8] * 9), max_new=40))
    lab.launch()
    lab.launch()
    lab.scheduler.abort(3)
    rows = lab.scheduler.residency.rows
    assert (rows.n_pages[:4].tolist(), rows.kv[:4].tolist()) == ([5, 5, 3, 0], [9, 18, 10, 0])
    assert rows.owed_pages(0.0) == 8 - 5  # of the second: 30 tokens are known
    assert rows.owed_pages(1.0) == (7 - 5) + (9 - 5)  # 27 and 34 tokens in the end
    assert rows.owed_pages(0.65) == (6 - 5) + (9 - 5)  # 21 and 33 tokens
    assert rows.owed_pages(0.5) == 0 + (8 - 5)  # 9 + 18 / 2 and 30 + 4 / 2 tokens
    lab.land()
    lab.finish()


def test_rows_get_one_page_each_when_there_are_not_several() -> None:
    lab = Lab(grow=3, pages=5, cache=build(NaiveCachePolicy), policy=build(ChunkedScheduler, reserve=0.01))
    admits = [ask(1, 4, max_new=13), ask(2, ints([7] * 4), max_new=13)]
    lab.give(*admits)
    lab.step()
    plan = lab.step()
    assert (plan.n_decode, sorted(plan.grow_slot.tolist()), plan.grow_at.tolist()) == (2, [0, 1], [1, 1])
    assert lab.count("free") == 1
    lab.finish()
    lab.check(*admits)


@pytest.mark.parametrize("comes_back", [True, False])
def test_nobody_is_preempted_for_pages_that_come_back_with_the_step_in_flight(comes_back: bool) -> None:
    """A row lacks a page; a second copy of a page is free once the step in flight is done. If it is not a second copy, the
    row that is not in flight is preempted at once."""
    lab = Lab(pages=4, policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    paused = ask(0, ints([7] * 2), max_new=5, priority=-1)
    first, second = ask(1, 8, max_new=1), ask(2, 8 if comes_back else ints([3] * 12), max_new=3)
    lab.give(*([first] if comes_back else []), paused)
    lab.step()
    lab.give(second)
    tell(lab, lambda v, b: (b.decode(False), [b.prefill(r) for r in v.waiting()]))
    lab.launch()
    assert (lab.count("free"), lab.count("held"), lab.count("in_flight")) == (0, int(comes_back), 1)
    plan = lab.launch()
    assert (plan is None) == comes_back
    assert lab.count("preemptions") == (0 if comes_back else 1)
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    lab.finish()
    lab.check(paused, second)


def test_rows_that_lack_pages_wait_while_all_of_them_are_in_flight() -> None:
    lab = Lab(pages=2, cache=build(NaiveCachePolicy), policy=build(Told))
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    admits = [ask(1, 4), ask(2, ints([7] * 4))]
    lab.give(*admits)
    assert lab.launch() is not None
    assert lab.launch() is None
    assert lab.count("preemptions") == 0
    lab.land()
    assert lab.launch() is not None
    assert lab.count("preemptions") == 1
    lab.finish()
    lab.check(*admits)


def test_preemption_is_refused_where_it_is_not_possible() -> None:
    """Of a request that waits, of one with work in flight, and of one that has just ended."""

    class Late(Told):
        builder: StepBuilder
        late: list[bool]

        def changed(self, r: ReqView, old: ReqState) -> None:
            if r.state is ReqState.DONE:
                self.late.append(self.builder.preempt(r))

    lab, a = Lab(policy=build(Late), slots=1), ask(1, 9, max_new=2)
    policy = lab.policy
    assert isinstance(policy, Late)
    policy.builder, policy.late = lab.scheduler._builder, []
    tell(lab, lambda v, b: [b.prefill(r) for r in v.waiting()])
    lab.give(a)
    [r] = lab.scheduler.view.waiting()
    assert (r.kv_len, policy.builder.preempt(r)) == (0, False)
    lab.launch()
    assert policy.builder.preempt(r) is False
    lab.land()
    lab.finish()
    assert policy.late == [False]
    lab.check(a)


# ------------------------------------------------------------------------------------------------- waiting for a prefill


def test_writes_of_a_closed_row_are_forgotten_and_those_of_others_kept() -> None:
    """Two rows have a second copy of a page; one of them ends before the plan that repoints them."""
    lab = Lab(cache=build(RadixCachePolicy))
    a, b, c = (ask(uid, 8, max_new=12) for uid in range(3))
    lab.give(a)
    lab.step()
    lab.give(b, c)
    second = lab.launch()
    assert second is not None
    own = {init.uid: (init.slot, int(init.pages[1])) for init in second.init}
    lab.scheduler.abort(1)
    lab.land()
    third = lab.launch()
    assert third is not None
    assert set(third.retire.tolist()) == {own[1][0]}
    assert own[1][0] not in third.grow_slot
    assert (own[2][0], 1) in zip(third.grow_slot.tolist(), third.grow_at.tolist())
    lab.land()
    lab.finish()
    lab.check(a, c)


def test_a_row_that_joins_and_leaves_between_two_plans_is_not_told() -> None:
    lab = Lab()
    lab.give(ask(1, 5), ask(2, ints([7] * 5)))
    lab.step()
    lab.scheduler.abort(2)
    plan = lab.step()
    assert (plan.order_pos.tolist(), plan.order_slot.tolist()) == ([0], [plan.order_slot[0]])
    lab.finish()


def test_nobody_waits_for_a_cache_that_keeps_nothing() -> None:
    lab, admits = Lab(cache=build(NaiveCachePolicy)), [ask(uid, 12) for uid in range(3)]
    lab.give(ask(9, 12, max_new=1))
    lab.finish()
    lab.give(*admits)
    assert len(lab.step().spans) == 3
    lab.finish()
    lab.check(*admits)


# ------------------------------------------------------------------------------------------------------------ end of life


def test_pages_of_an_ended_row_stay_until_the_step_launched_with_it_is_done() -> None:
    """M4: the row stopped in step 1 and takes part in step 2, whose token is dropped."""
    first, stop = expected(ask(1, 9), 256)[0][:2]
    assert first != stop
    lab = Lab(cache=build(NaiveCachePolicy))
    lab.give(ask(1, 9, max_new=30, stop_ids=(stop,)))
    lab.launch()
    lab.launch()
    lab.land()
    lab.launch()
    lab.land()
    assert lab.ended[1] == Ended(1, Finish.STOP, 9, 2, 0)
    assert (lab.count("free"), lab.scheduler.idle) == (64 - 3, False)
    lab.give(ask(2, 9, max_new=1))
    plan = lab.launch()
    assert plan is not None
    assert plan.init[0].slot != lab.plans[0].init[0].slot
    assert not set(plan.init[0].pages.tolist()) & set(lab.plans[0].init[0].pages.tolist())
    lab.land()
    assert lab.tokens[1] == [first, stop]
    assert lab.count("free") == 64 - 3
    lab.land()
    assert (lab.count("free"), lab.scheduler.idle) == (64, True)


def test_the_extra_step_of_an_ended_row_frees_its_pages_once() -> None:
    """S4: one short prompt, 200 tokens, page size 1, overlap."""
    stop = next(t for t in reversed(expected(ask(1, 5, max_new=200), 256)[0]))
    for stop_ids in ((), (stop,)):
        lab = Lab(loop=OverlapLoop, page_size=1, pages=256)
        lab.inbox.append(ask(1, 5, max_new=200, stop_ids=stop_ids))
        lab.run()
        assert lab.count("free") + lab.count("evictable") == 256
        lab.check(ask(1, 5, max_new=200, stop_ids=stop_ids))


def test_a_length_end_is_known_before_its_token() -> None:
    """The row is in no plan after the one that samples its last token, also with two steps in flight."""
    lab = Lab(loop=OverlapLoop)
    lab.inbox.append(ask(1, 5, max_new=4))
    lab.run()
    assert [p.n_decode + len(p.spans) for p in lab.plans] == [1, 1, 1, 1]
    assert lab.device.tokens_computed == 5 + 3


def test_the_last_token_of_a_length_end_is_delivered() -> None:
    """M15."""
    for n in (1, 2, 7):
        lab, a = Lab(), ask(1, 5, max_new=n)
        lab.give(a)
        lab.finish()
        assert len(lab.tokens[1]) == lab.ended[1].output_tokens == n
        lab.check(a)


def test_an_aborted_decode_row_gives_everything_back_within_a_step() -> None:
    """M1, I9: no token of it comes after the abort, and its prompt stays cached."""
    lab = Lab()
    lab.give(ask(1, 9, max_new=100))
    lab.step()
    lab.launch()
    lab.launch()
    lab.scheduler.abort(1)
    lab.flush()
    assert lab.ended[1] == Ended(1, Finish.ABORT, 9, 1, 0)
    assert lab.launch() is None
    lab.land()
    assert list(lab.scheduler.reqs) == [1]
    lab.land()
    assert lab.scheduler.idle
    assert lab.tokens[1] == expected(ask(1, 9), 256)[0][:1]
    assert (lab.count("free"), lab.count("evictable")) == (62, 2)


def test_an_abort_amid_prefill_gives_everything_back_and_caches_nothing() -> None:
    """S1: 12 prompts of 39 chunks each, aborted with a chunk in flight."""
    lab = Lab(slots=12, pages=1000, max_len=400, batch=12 * 8, policy=build(ChunkedScheduler, max_chunk=8))
    rng = np.random.default_rng(0)
    lab.give(*(ask(uid, ints(rng.integers(0, 90, 312))) for uid in range(12)))
    for _ in range(3):
        lab.launch()
    lab.land()
    for uid in range(12):
        lab.scheduler.abort(uid)
        lab.scheduler.abort(uid)  # twice has no effect
    lab.flush()
    assert {e.finish for e in lab.ended.values()} == {Finish.ABORT}
    assert len(lab.ended) == 12
    lab.land()
    lab.land()
    assert lab.scheduler.idle
    assert (lab.count("free"), lab.count("evictable")) == (1000, 0)
    assert lab.tokens == {uid: [] for uid in range(12)}


def test_an_abort_with_nothing_in_flight_gives_the_row_back_at_once() -> None:
    """No step will come to do it."""
    lab = Lab(cache=build(NaiveCachePolicy))
    lab.give(ask(1, 9, max_new=100))
    lab.step()
    assert lab.count("free") == 64 - 3
    lab.scheduler.abort(1)
    assert (lab.count("free"), lab.scheduler.idle) == (64, True)


def test_a_waiting_request_is_aborted_at_once() -> None:
    lab = Lab(slots=1)
    lab.give(ask(1, 5), ask(2, 5))
    lab.step()
    lab.scheduler.abort(2)
    lab.scheduler.abort(77)  # unknown: no effect
    lab.flush()
    assert lab.ended[2] == Ended(2, Finish.ABORT, 5, 0, 0)
    lab.finish()
    lab.check(ask(1, 5))


def test_a_failed_request_says_why_and_the_others_go_on() -> None:
    lab = Lab()
    lab.give(ask(1, 9), ask(2, ints([7] * 9)))
    lab.step()
    lab.scheduler.fail(1, "its grammar ran out of memory")
    lab.scheduler.fail(1, "again")
    lab.finish()
    assert lab.ended[1] == Ended(1, Finish.ERROR, 9, 1, 0, "its grammar ran out of memory")
    lab.check(ask(2, ints([7] * 9)))


def test_outputs_go_to_their_owner_in_order_and_once() -> None:
    lab = Lab()
    lab.give(ask(1, 5, 1, owner=0), ask(2, ints([7] * 5), 2, owner=3))
    lab.scheduler.schedule()
    lab.scheduler.commit(StepResult(0, ints([11, 12]), np.array([False, False])))
    out = lab.scheduler.take_outputs()
    tokens, end = out[0]
    assert isinstance(tokens, Tokens)
    assert (tokens.step, tokens.uids.tolist(), tokens.tokens.tolist()) == (0, [1], [11])
    assert end == Ended(1, Finish.LENGTH, 5, 1, 0)
    (other,) = out[3]
    assert isinstance(other, Tokens)
    assert (other.uids.tolist(), other.tokens.tolist()) == ([2], [12])
    assert lab.scheduler.take_outputs() == {}


def test_a_row_stops_by_its_own_token_beside_one_that_has_ended() -> None:
    """What the step gave to the ended row is left out of tokens, stops and owners alike."""
    lab = Lab()
    lab.give(ask(1, 5, owner=1), ask(2, ints([7] * 5)))
    lab.scheduler.schedule()
    lab.scheduler.abort(1)
    lab.scheduler.commit(StepResult(0, ints([11, 12]), np.array([False, True])))
    out = lab.scheduler.take_outputs()
    assert out[1] == [Ended(1, Finish.ABORT, 5, 0, 0)]
    tokens, end = out[0]
    assert isinstance(tokens, Tokens)
    assert (tokens.step, tokens.uids.tolist(), tokens.tokens.tolist()) == (0, [2], [12])
    assert end == Ended(2, Finish.STOP, 5, 1, 0)


def test_commits_out_of_order_are_an_error() -> None:
    """I1."""
    lab = Lab()
    lab.give(ask(1, 5))
    lab.scheduler.schedule()
    with pytest.raises(AssertionError, match="result of step 1, expected 0"):
        lab.scheduler.commit(StepResult(1, ints([1]), np.array([False])))


# --------------------------------------------------------------------------------------------------- pages run short


def test_a_request_is_admitted_only_if_its_whole_context_fits() -> None:
    """S7: two rows of 20 + 20 tokens do not fit in 16 pages of 4, however short the first chunk is."""
    lab = Lab(pages=16, policy=build(ChunkedScheduler, max_chunk=4), cache=build(NaiveCachePolicy))
    a, b = ask(1, 20, max_new=21), ask(2, ints([3] * 20), max_new=21)
    lab.give(a, b)
    while 1 not in lab.ended:
        assert lab.scheduler.n_running <= 1
        lab.step()
    lab.finish()
    lab.check(a, b)
    assert lab.count("preemptions") == 0


def test_admission_counts_a_shared_prefix_once() -> None:
    """Eight rows with a common prompt of 40 tokens run at once in a pool that holds it once, and 4 pages for each."""
    lab = Lab(slots=8, pages=10 + 8 * 3)
    first = ask(0, 40, max_new=1)
    lab.give(first)
    lab.finish()
    admits = [ask(uid, np.concatenate([ints(range(40)), ints([50 + uid])]), max_new=11) for uid in range(1, 9)]
    lab.give(*admits)
    lab.step()
    assert lab.scheduler.n_running == 8
    lab.finish()
    lab.check(*admits)
    assert lab.count("preemptions") == 0


def test_a_cached_prefix_that_admission_pins_no_longer_counts_as_room() -> None:
    """The pages it would lease are all that is evictable: they cannot also be evicted for its output."""
    lab = Lab(slots=2, pages=12)
    lab.give(ask(1, 20, max_new=1))
    lab.finish()
    assert lab.count("evictable") == 5
    lab.give(ask(2, ints([3] * 4), max_new=13))  # owes 4 pages; leaves 12 - 4 = 8, of which 5 hold the first prompt
    lab.step()
    lab.give(ask(3, 20, max_new=17))  # needs 9 pages in all
    lab.step()
    assert lab.scheduler.n_waiting == 1
    lab.finish()
    assert lab.count("preemptions") == 0


def test_a_preempted_request_gives_the_same_output() -> None:
    """N2, N4: it is prefilled again with what it had emitted, hits its own pages, and its random stream goes on."""
    lab = Lab(pages=14, policy=build(ChunkedScheduler, reserve=0.01))
    admits = [ask(uid, ints([uid] * 8), max_new=30) for uid in range(3)]
    lab.give(*admits)
    lab.finish()
    lab.check(*admits)
    assert lab.count("preemptions") > 0
    resumed = [init for plan in lab.plans for init in plan.init if init.emitted]
    assert resumed
    for init in resumed:
        assert init.kv_len + len(init.ids) == 8 + init.emitted
    assert any(init.kv_len for init in resumed)
    assert [lab.ended[uid].cached_tokens for uid in range(3)] == [0, 0, 0], "counted at first admission"


def test_the_youngest_of_lowest_priority_is_preempted() -> None:
    lab = Lab(pages=13, policy=build(ChunkedScheduler, reserve=0.01))
    lab.give(ask(0, ints([1] * 8), 40, priority=1), ask(1, ints([2] * 8), 40), ask(2, ints([3] * 8), 40))
    while not lab.count("preemptions"):
        lab.step()
    assert [r.uid for r in lab.scheduler.view.waiting()] == [2]
    lab.finish()


def test_a_prompt_preempted_amid_prefill_is_not_cached() -> None:
    """Its second page is half computed. Also not when it had been computed once, and its pages were evicted."""
    lab, a = Lab(policy=build(ChunkedScheduler, max_chunk=6)), ask(1, 20, max_new=12)
    lab.give(a)
    for n_steps in (1, 6, 1):
        for _ in range(n_steps):
            lab.step()
        [r] = [*lab.scheduler.view.prefilling(), *lab.scheduler.view.decoding()]
        prefills = r.state is ReqState.PREFILL
        assert Builder(lab.scheduler).preempt(r)
        lab.scheduler.audit()
        assert prefills == (n_steps == 1)
        assert lab.scheduler.clear_cache() == (0 if prefills else 5)
        assert lab.count("free") == 64
    assert lab.count("preemptions") == 3
    lab.finish()
    lab.check(a)


def test_the_output_of_a_preempted_request_is_cached() -> None:
    """All its full pages: 9 prompt tokens and the first 7 of 8 emitted have their KV."""
    lab, a = Lab(), ask(1, 9, max_new=20)
    lab.give(a)
    for _ in range(8):
        lab.step()
    [r] = lab.scheduler.view.decoding()
    assert Builder(lab.scheduler).preempt(r)
    assert lab.count("evictable") == 4
    plan = lab.step()
    assert (plan.init[0].kv_len, plan.init[0].emitted, plan.spans[0].n_new) == (16, 8, 1)
    lab.finish()
    lab.check(a)


def test_a_preempted_request_waits_before_those_that_came_later() -> None:
    lab = Lab(pages=13, policy=build(ChunkedScheduler, reserve=0.01))
    lab.give(*(ask(uid, ints([uid + 1] * 8), 40) for uid in range(3)))
    lab.step()
    lab.give(ask(3, ints([4] * 40), 2))
    while not lab.count("preemptions"):
        lab.step()
    assert [r.uid for r in lab.scheduler.view.waiting()] == [2, 3]
    lab.finish()


def test_a_prompt_that_fills_the_pool_ends_by_length() -> None:
    """N3: two pages, a prompt that leaves room for one token."""
    lab, a, b = Lab(pages=2, slots=2), ask(1, 7, max_new=9), ask(2, ints([5] * 7), max_new=9)
    lab.give(a, b)
    lab.finish()
    lab.check(a, b)
    assert len(lab.tokens[1]) == 1


class Lazy(SchedulerPolicy):
    """Plans no prefill."""

    def __init__(self, ctx: SchedContext) -> None:
        pass

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        pass


def test_without_progress_the_oldest_request_is_given_up_and_the_engine_goes_on() -> None:
    """S6, I12."""
    lab = Lab(policy=build(Lazy))
    lab.give(ask(1, 5), ask(2, 5))
    assert lab.launch() is None
    assert not lab.ended
    assert lab.launch() is None
    lab.flush()
    assert list(lab.ended) == [1]
    assert lab.ended[1].finish is Finish.ERROR
    assert "no step could be planned for 2 passes with 2 requests, 64 pages free" in lab.ended[1].detail
    assert lab.launch() is None
    lab.flush()
    assert list(lab.ended) == [1], "the passes count anew"
    assert lab.launch() is None
    lab.flush()
    assert list(lab.ended) == [1, 2]
    assert lab.scheduler.idle


def test_a_step_in_flight_is_not_taken_for_a_stall() -> None:
    lab = Lab(slots=1)
    lab.give(ask(1, 5, max_new=1), ask(2, ints([3] * 5), max_new=1))
    assert lab.launch() is not None
    for _ in range(5):
        assert lab.launch() is None
    lab.finish()
    lab.check(ask(1, 5, max_new=1), ask(2, ints([3] * 5), max_new=1))


@pytest.mark.parametrize("also_in_flight", [False, True])
def test_only_passes_in_a_row_are_a_stall(also_in_flight: bool) -> None:
    """One pass plans; the next does not, with nothing in flight, or one with that step in flight and then one without."""

    class Slow(ChunkedScheduler):
        passes = 0

        def plan(self, v: SchedView, b: StepBuilder) -> None:
            self.passes += 1
            if self.passes % (2 + also_in_flight) == 1:
                super().plan(v, b)

    lab = Lab(policy=build(Slow), slots=1)
    admits = [ask(uid, ints([uid] * 5), max_new=1) for uid in range(4)]
    lab.give(*admits)
    for _ in admits:
        assert lab.launch() is not None
        assert not also_in_flight or lab.launch() is None
        lab.land()
        assert lab.launch() is None
    lab.check(*admits)


def test_counts_are_of_pages_requests_and_totals() -> None:
    """Three rows in pages of 4: one decodes, one prefills, one has ended with its step in flight; one waits."""
    lab = Lab(slots=3, batch=16, pages=32, policy=build(ChunkedScheduler, max_chunk=10))
    lab.give(ask(1, 9), ask(2, ints([7] * 30)), ask(3, ints([8] * 5)), ask(4, ints([9] * 5)))
    lab.step()
    lab.launch()
    lab.launch()
    lab.scheduler.abort(3)
    counts = dict(lab.scheduler.counts())
    assert counts == {
        "free": 32 - 3 - 7 - 2,  # rows of 11, 7 + 10 + 10 and 6 tokens
        "held": 0,
        "evictable": 0,
        "locked": 3,
        "waiting": 1,
        "running": 2,
        "prefilling": 1,
        "decoding": 1,
        "in_flight": 2,
        "cached_tokens_total": 0,
        "prompt_tokens_total": 9 + 30 + 5,
        "preemptions": 0,
        "cache_queries": 3,
        "cache_hit_tokens": 0,
        "cache_evicted_pages": 0,
    }
    lab.finish()


def test_an_audit_finds_a_lost_page() -> None:
    lab = Lab()
    lab.pages.take(1)
    with pytest.raises(AssertionError, match=r"pages without an owner: \{0\}"):
        lab.scheduler.audit()


def test_counts_say_what_the_cache_was_asked_gave_and_gave_up() -> None:
    lab = Lab(pages=8, slots=1)
    lab.give(ask(1, 13, max_new=1), ask(2, 13, max_new=1))
    lab.finish()
    counts = lab.scheduler.counts()
    assert (counts["cache_queries"], counts["cache_hit_tokens"], counts["cache_evicted_pages"]) == (2, 12, 0)
    lab.give(ask(3, ints([9] * 24), max_new=1))
    lab.finish()
    counts = lab.scheduler.counts()
    assert (counts["cache_queries"], counts["cache_hit_tokens"], counts["cache_evicted_pages"]) == (3, 12, 1)


# --------------------------------------------------------------------------------------------------------------- policies


class Probe(ChunkedScheduler):
    """Notes what it is told."""

    def __init__(self, ctx: SchedContext) -> None:
        super().__init__(ctx)
        self.plans = 0
        self.states: list[tuple[int, str, str]] = []

    def changed(self, r: ReqView, old: ReqState) -> None:
        super().changed(r, old)
        self.states.append((r.uid, old.name, r.state.name))

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        self.plans += 1
        super().plan(v, b)


def test_the_policy_is_not_asked_while_all_rows_decode() -> None:
    lab = Lab(policy=build(Probe))
    lab.give(ask(1, 5, max_new=20))
    lab.finish()
    assert isinstance(lab.policy, Probe)
    assert lab.policy.plans == 1
    assert lab.policy.states == [(1, "WAITING", "PREFILL"), (1, "PREFILL", "DECODE"), (1, "DECODE", "DONE")]


class Asking(SchedulerPolicy):
    """Does what the test says, with the view and the builder of each pass."""

    def __init__(self, ctx: SchedContext) -> None:
        self.log: list[object] = []

    def plan(self, v: SchedView, b: StepBuilder) -> None:
        waiting = list(v.waiting())
        self.log.append(("budget", b.budget, "owed", v.owed_tokens, "cached", [v.cached(r) for r in waiting]))
        for r in [*v.prefilling(), *waiting]:
            self.log.append(b.prefill(r, 3))
            self.log.append(b.prefill(r, 3).deny)
        for r in v.decoding():
            self.log.append((r.uid, r.emitted, r.left, r.kv_len, b.prefill(r).deny))


def test_a_policy_sees_exact_numbers_and_is_denied_what_cannot_be() -> None:
    lab = Lab(policy=build(Asking), slots=2, batch=8)
    assert isinstance(lab.policy, Asking)
    lab.give(ask(1, 5, max_new=4))
    lab.step()
    lab.step()
    lab.give(ask(2, 5, max_new=4), ask(3, 5, max_new=4))
    lab.step()
    log = lab.policy.log
    assert log[0] == ("budget", 8, "owed", 0, "cached", [0])
    assert (log[1].tokens, log[1].done, log[2]) == (3, False, Deny.TWICE)  # type: ignore[attr-defined]
    assert log[3] == ("budget", 8, "owed", 5 + 3 - 3, "cached", [])
    assert (log[4].tokens, log[4].done, log[5]) == (2, True, Deny.TWICE)  # type: ignore[attr-defined]
    assert log[6] == ("budget", 7, "owed", 3, "cached", [4, 4])
    assert (log[7].tokens, log[7].done) == (1, True)  # type: ignore[attr-defined]
    assert log[9].deny is Deny.SLOTS  # type: ignore[attr-defined]
    assert log[11] == (1, 1, 3, 5, Deny.BUSY)


def test_a_policy_that_keeps_an_old_request_gets_nothing_for_it() -> None:
    """Its uid may be another's by now."""
    lab = Lab()
    lab.give(ask(1, 9))
    [old] = lab.scheduler.view.waiting()
    lab.finish()
    del lab.ended[1]
    lab.give(ask(1, 9))
    builder = Builder(lab.scheduler)
    assert builder.prefill(old).deny is Deny.BUSY
    assert not builder.preempt(old)
    assert lab.scheduler.view.cached(old) == 0
    [new] = lab.scheduler.view.waiting()
    assert lab.scheduler.view.cached(new) == 8
    assert builder.prefill(new).tokens == 1


def test_what_a_policy_sees_cached_shrinks_with_evictions() -> None:
    """The memo of a match does not outlive the pages it counted: a row that grows takes those of a waiting prompt."""
    lab = Lab(slots=1, pages=8)
    lab.give(ask(1, 17, max_new=1))
    lab.finish()
    lab.give(ask(2, ints([9] * 4), max_new=25))
    lab.step()
    lab.give(ask(3, 17, max_new=1))
    [waits] = lab.scheduler.view.waiting()
    seen = []
    while 2 not in lab.ended:
        if (pages := int(lab.scheduler.residency.rows.n_pages[0])) > 1:
            seen.append((pages, lab.scheduler.view.cached(waits) // PAGE))
        lab.step()
    assert set(seen) == {(have, min(4, 8 - have)) for have in range(2, 8)}  # the row has what the prompt lost
    lab.finish()


def test_what_a_plugin_raises_names_it() -> None:
    class Broken(ChunkedScheduler):
        def plan(self, v: SchedView, b: StepBuilder) -> None:
            raise ZeroDivisionError("oops")

    class BrokenCache(RadixCachePolicy):
        def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
            raise KeyError("gone")

    lab = Lab(policy=build(Broken))
    lab.give(ask(1, 5))
    with pytest.raises(ZeroDivisionError) as policy:
        lab.launch()
    assert policy.value.__notes__[0].endswith("Broken.plan()")
    lab = Lab(cache=build(BrokenCache))
    lab.give(ask(1, 5))
    with pytest.raises(KeyError) as cache:
        lab.launch()
    assert cache.value.__notes__[0].endswith("BrokenCache.insert()")


def test_an_insert_that_breaks_the_contract_is_refused() -> None:
    class Short(RadixCachePolicy):
        def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
            ins = super().insert(tokens, pages, lease, namespace)
            return Inserted(ins.lease, ins.canonical[:-1])

    lab = Lab(cache=build(Short))
    lab.give(ask(1, 9))
    with pytest.raises(
        CacheError, match=r"insert\(\) of 2 pages, 0 of them leased, returned 1 canonical pages and a lease"
    ):
        lab.launch()


# ------------------------------------------------------------------------------------------------------------------ cost


def python_calls(lab: Lab) -> int:
    """Python function calls of one schedule and one commit."""
    plan, scheduling = counted(lab.scheduler.schedule)
    assert plan is not None
    result = lab.device.run(plan)
    _, committing = counted(lambda: lab.scheduler.commit(result))
    return scheduling + committing


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_steady_step_costs_no_python_call_per_row(page_size: int) -> None:
    """The same number of calls for 4 rows and for 64, page borders included."""
    calls = []
    for rows in (4, 64):
        lab = Lab(slots=64, pages=64 * 120 // page_size, page_size=page_size, batch=1000)
        lab.give(*(ask(uid, ints([uid] * 9), max_new=100) for uid in range(rows)))
        lab.step()
        calls.append([python_calls(lab) for _ in range(20)])
    assert calls[0] == calls[1]


def test_a_steady_plan_carries_only_what_changed() -> None:
    lab = Lab(page_size=16)
    lab.give(ask(1, 17, max_new=40))
    lab.step()
    lab.step()
    plan = lab.step()
    assert plan.n_decode == 1
    for name in ("retire", "init", "grow_slot", "grow_at", "grow_page", "order_pos", "order_slot", "spans"):
        assert len(getattr(plan, name)) == 0, name


def test_grow_pages_gives_several_pages_at_a_time_and_none_beyond_the_end() -> None:
    lab, a = Lab(grow=3, cache=build(NaiveCachePolicy)), ask(1, 4, max_new=21)
    lab.give(a)
    lab.finish()
    grows = [len(p.grow_page) for p in lab.plans if len(p.grow_page)]
    assert grows == [3, 2]  # 24 tokens of KV: 6 pages
    lab.check(a)


def test_abort_messages_through_the_inbox_end_requests() -> None:
    lab = Lab(loop=OverlapLoop)
    lab.inbox.extend([ask(1, 9, max_new=50), ask(2, ints([4] * 9), max_new=5)])
    lab.turn()
    lab.inbox.append(Abort((1, 5)))
    lab.run()
    assert lab.ended[1].finish is Finish.ABORT
    lab.check(ask(2, ints([4] * 9), max_new=5))


def test_a_prompt_is_scored_once_every_token_but_its_first_has_been() -> None:
    """The first token follows nothing, so it has no log probability."""
    asked = Admit(1, ints(range(5)), SamplingSpec(prompt_logprobs=0))
    r = Req.of(asked, asked.ids, 8, 0, Rows(Limits(1, 64, 16, PAGE, 64)))
    for scored, left in ((0, True), (3, True), (4, False)):
        r.scored = scored
        assert r.scores is left
    alone = Admit(2, ints([7]), SamplingSpec(prompt_logprobs=0))
    assert not Req.of(alone, alone.ids, 8, 1, Rows(Limits(1, 64, 16, PAGE, 64))).scores


def test_scored_prompts_are_computed_anew_and_their_scores_go_to_their_owner() -> None:
    """Though another request's cached pages hold the same tokens; nobody else's prompt is scored."""
    lab = Lab(batch=8)
    lab.give(ask(1, 17))
    lab.finish()
    before = len(lab.plans)
    wanted = SamplingSpec(max_new=4, logprobs=0, prompt_logprobs=0)
    scored = [Admit(uid, ints(range(17)), wanted, owner=owner) for uid, owner in ((2, 1), (3, 0))]
    plain = Admit(4, ints(range(17)), SamplingSpec(max_new=4), owner=1)
    lab.give(*scored, plain)
    lab.finish()
    lab.check(*scored, plain)
    plans = lab.plans[before:]
    rows = {i.uid: i for p in plans for i in p.init}
    assert [rows[uid].kv_len for uid in (2, 3, 4)] == [0, 0, 16]
    for uid in (2, 3, 4):
        begin = rows[uid].kv_len
        for span in (s for p in plans for s in p.spans if s.slot == rows[uid].slot):
            assert span.score == (uid != 4 and begin < 16)  # what follows the last prompt token is no prompt token
            begin += span.n_new
        assert begin == 17
    assert sorted(lab.scores[2]) == sorted(lab.scores[3]) == list(range(1, 21))
    assert lab.scores[4] == {}


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_prompt_preempted_amid_its_scoring_is_scored_from_its_start_one_scored_whole_is_not_again(
    chunks: int,
) -> None:
    lab = Lab(batch=16)
    asked = Admit(1, ints(range(30)), SamplingSpec(max_new=6, logprobs=0, prompt_logprobs=0))
    lab.give(asked)
    for _ in range(chunks):
        lab.step()
    [r] = lab.scheduler.view.prefilling() if chunks == 1 else lab.scheduler.view.decoding()
    assert Builder(lab.scheduler).preempt(r)
    before = len(lab.plans)
    lab.finish()
    lab.check(asked)
    assert [s.score for p in lab.plans[before:] for s in p.spans] == ([True, True] if chunks == 1 else [False])


def test_a_row_comes_with_its_whole_prompt_only_if_its_sampling_needs_it() -> None:
    lab = Lab()
    lab.give(ask(1, 17))
    lab.finish()
    before = len(lab.plans)
    penalized = Admit(2, ints(range(17)), SamplingSpec(max_new=4, repetition_penalty=1.5))
    lab.give(penalized, ask(3, 17))
    lab.finish()
    rows = {i.uid: i for p in lab.plans[before:] for i in p.init}
    assert rows[2].kv_len == 16  # cached, and so not among its ids
    assert rows[2].prompt.tolist() == list(range(17))
    assert rows[3].prompt.tolist() == rows[2].written.tolist() == []


SCORED = SamplingSpec(max_new=8, logprobs=0, prompt_logprobs=0)


def test_cached_pages_are_no_room_for_a_scored_prompt_which_does_not_read_them() -> None:
    """Of 8 pages a running row holds 3 and the cache the first 5 of the prompt; with its output the prompt needs 6."""
    lab = Lab(pages=8)
    lab.give(ask(1, 17))
    lab.finish()
    lab.give(ask(2, ints([9] * 9), max_new=4))
    lab.step()
    assert (lab.count("free"), lab.count("evictable")) == (0, 5)
    asked = Admit(3, ints(range(17)), SCORED)
    lab.give(asked)
    assert lab.step().init == ()
    lab.finish()
    lab.check(asked)
    assert lab.count("preemptions") == 0


def test_a_scored_prompt_does_not_wait_for_the_same_prompt_of_another() -> None:
    lab = Lab(batch=16)
    asked = Admit(2, ints(range(12)), SCORED)
    lab.give(ask(1, 12), asked)
    assert [i.uid for i in lab.step().init] == [1, 2]
    lab.finish()
    lab.check(asked)


def test_a_waiting_request_sees_what_has_been_cached_since_it_was_looked_up() -> None:
    lab = Lab()
    residency, asked = lab.scheduler.residency, Admit(9, ints(range(18)), SamplingSpec(max_new=1))
    r = Req.of(asked, asked.ids, 1, 0, residency.rows)
    for n, prompt in enumerate((ints([5] * 9), ints(range(9)), ints(range(17)))):
        lab.give(ask(n, prompt, max_new=1))
        lab.finish()
        assert residency.matched(r) == (0, 2, 4)[n]
