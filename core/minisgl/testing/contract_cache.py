"""The contract of cache policies."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest

from minisgl.base.errors import CacheError
from minisgl.sched.cache import CacheContext, CachePolicy, EmptyLease
from minisgl.testing.cache_model import CacheModel, Holder, ints
from minisgl.testing.calls import counted
from minisgl.testing.contracts import ComponentContract

NAMESPACES = (b"", b"", b"salt")


def random_prompt(rng: Random, longest: int) -> list[int]:
    """Two token values, and often the same beginning: prefixes are shared, and part everywhere."""
    n = rng.randrange(longest + 1)
    if rng.random() < 0.6:
        base = Random(rng.randrange(3))
        tokens = [base.randrange(2) for _ in range(n)]
        if n and rng.random() < 0.5:
            tokens[rng.randrange(n) :] = [rng.randrange(2)]
        return tokens
    return [rng.randrange(2) for _ in range(n)]


def random_step(model: CacheModel, rng: Random, longest: int) -> None:
    """One thing that an engine may do with a cache."""
    what = rng.choice(["admit", "admit", "admit", "grow", "release", "release", "evict", "match", "clear"])
    if what == "admit":
        admit(model, random_prompt(rng, longest), rng.choice(NAMESPACES))
    elif what == "match":
        model.match(random_prompt(rng, longest), rng.choice(NAMESPACES))
    elif what == "evict":
        model.evict(rng.choice([0, 1, 2, 5, model.num_pages]))
    elif what == "clear" and rng.random() < 0.1:
        model.clear()
    elif model.holders and what == "release":
        model.release(rng.choice(model.holders))
    elif model.holders and what == "grow":
        grow(model, rng.choice(model.holders), rng)


def admit(model: CacheModel, tokens: list[int], namespace: bytes) -> Holder | None:
    """Lease the prefix, compute the rest, insert it. None, and nothing held, if there are not enough pages."""
    holder = model.lease(tokens[:-1], namespace)
    n_full = len(tokens) // model.page_size
    own = model.take(n_full - holder.lease.n_pages)
    if own is None:
        model.release(holder)
        return None
    holder.own = own
    model.insert(holder, tokens)
    return holder


def grow(model: CacheModel, holder: Holder, rng: Random) -> None:
    """A row that generated more: insert again."""
    end = len(holder.leased) * model.page_size
    tokens = holder.tokens[:end] + [rng.randrange(2) for _ in range(rng.randrange(1, 3 * model.page_size + 1))]
    own = model.take(max(0, len(tokens) // model.page_size - len(holder.leased) - len(holder.own)))
    if own is not None:
        holder.own += own
        model.insert(holder, tokens)


class CacheContract(ComponentContract):
    """Ownership, pins, content, counts; against a model that knows the prefix in every page."""

    def make(self, page_size: int = 4, num_pages: int = 40) -> CachePolicy:
        return cast(CachePolicy, self.cls(CacheContext(page_size, num_pages, self.settings(), lambda: 0)))  # type: ignore[call-arg]

    def model(self, page_size: int = 4, num_pages: int = 40) -> CacheModel:
        return CacheModel(self.make(page_size, num_pages), page_size, num_pages)

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize(("page_size", "num_pages"), [(1, 30), (2, 12), (4, 40), (16, 9)])
    def test_agrees_with_the_model_on_random_calls(self, page_size: int, num_pages: int, seed: int) -> None:
        rng, model = Random(seed), self.model(page_size, num_pages)
        for _ in range(120):
            random_step(model, rng, longest=min(6, num_pages) * page_size)
        while model.holders:
            model.release(model.holders[0])
        model.clear()
        assert sorted(model.free) == list(range(num_pages))

    def test_is_deterministic(self) -> None:
        models = [self.model(), self.model()]
        for model in models:
            rng = Random(5)
            for _ in range(300):
                random_step(model, rng, longest=24)
        assert models[0].trace == models[1].trace

    def test_a_prompt_shorter_than_a_page_is_no_match(self) -> None:
        """S2."""
        model = self.model(page_size=4)
        for _ in range(2):
            holder = admit(model, [1, 2, 3], b"")
            assert holder is not None
            assert holder.leased == []
            model.release(holder)
        assert model.match([1, 2, 3], b"") == 0
        assert len(model.cache.owned()) == 0

    def test_only_whole_pages_match(self) -> None:
        model = self.model(page_size=4)
        holder = admit(model, list(range(8)), b"")
        assert holder is not None
        kept = len(holder.leased)
        assert model.match(list(range(8)), b"") == kept
        assert model.match(list(range(7)), b"") == min(kept, 1)
        assert model.match([0, 1, 2, 9, 4, 5, 6, 7], b"") == 0

    def test_namespaces_share_nothing(self) -> None:
        model = self.model()
        first = admit(model, list(range(16)), b"a")
        assert first is not None
        assert model.match(list(range(16)), b"b") == 0
        second = admit(model, list(range(16)), b"b")
        assert second is not None
        assert not set(first.leased) & set(second.leased)

    def test_a_second_copy_stays_the_callers(self) -> None:
        """M5: two rows computed the same prefix; the second is told the first one's pages and keeps its own."""
        model = self.model()
        first, second = model.lease(list(range(8)), b""), model.lease(list(range(8)), b"")
        first.own, second.own = model.take(2) or [], model.take(2) or []
        model.insert(first, list(range(8)))
        model.insert(second, list(range(8)))
        assert second.leased == first.leased

    def test_pinned_pages_are_never_given_up(self) -> None:
        """M6, M7: eviction under pressure, with a lease in the middle of a prefix."""
        model = self.model(page_size=4, num_pages=12)
        long = admit(model, list(range(40)), b"")
        assert long is not None
        model.release(long)
        holder = model.lease(list(range(20)), b"")
        evictable = model.cache.stats().evictable
        for _ in range(evictable):
            assert model.evict(1)
        assert not model.evict(1)
        assert model.match(list(range(20)), b"") == len(holder.leased)

    def test_a_foreign_or_used_lease_is_refused(self) -> None:
        model = self.model()
        holder = admit(model, list(range(16)), b"")
        assert holder is not None
        if isinstance(holder.lease, EmptyLease):
            pytest.skip("this policy keeps nothing")
        model.release(holder)
        with pytest.raises(CacheError):
            model.cache.insert(ints(range(16)), ints([0, 1, 2, 3]), holder.lease, b"")
        model.check()

    def test_an_empty_lease_may_be_released_again(self) -> None:
        cache = self.make()
        lease = cache.lease(ints([]), b"")
        assert lease.n_pages == 0
        cache.release(EmptyLease())
        cache.release(lease)

    def test_stats_take_the_same_time_whatever_is_cached(self) -> None:
        """O(1), by the number of Python calls it makes."""
        small, large = self.model(1, 4000), self.model(1, 4000)
        for i in range(100):
            holder = admit(large, [i, *range(20)], b"")
            assert holder is not None
            large.release(holder)
        of_large, of_small = (counted(m.cache.stats, ("call", "c_call"))[1] for m in (large, small))
        assert of_large <= of_small + 2

    def test_counts_hits_and_evictions_rightly_or_not_at_all(self) -> None:
        model = self.model(page_size=4)
        holder = admit(model, list(range(16)), b"")  # asks for what is not there
        assert holder is not None
        model.release(holder)
        again = model.lease(list(range(10)), b"")
        hits = 4 * len(again.leased)
        model.release(again)
        gone = model.cache.evict(model.cache.stats().evictable)
        stats = model.cache.stats()
        assert stats.queries in (0, 2)
        assert stats.hit_tokens in (0, hits)
        assert stats.evicted_pages in (0, len(gone))

    def test_two_instances_are_independent(self) -> None:
        one, two = self.model(), self.model()
        admit(one, list(range(16)), b"")
        assert two.match(list(range(16)), b"") == 0
