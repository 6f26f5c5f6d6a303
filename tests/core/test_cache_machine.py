"""Radix cache and page ledger together against a model that is a dict of prefixes: exact matches, exact LRU and LFU order, owners."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.base.errors import CacheError
from minisgl.base.types import I32
from minisgl.sched.cache import CacheContext, EmptyLease, Lease
from minisgl.sched.pages import PageLedger
from minisgl.testing.cache_model import CacheModel
from minisgl_plugins.cache.radix import RadixCachePolicy

Key = tuple[bytes, tuple[int, ...]]  # namespace, tokens up to the end of a page

# Beginnings of a few texts: most prompts meet, prefixes part inside nodes, and texts repeat with a short period.
TEXTS = ([0] * 12, [0, 1] * 6, [0, 0, 0, 1] * 3, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], [1] * 12)
TOKENS = st.builds(lambda text, n: text[:n], st.sampled_from(TEXTS), st.integers(0, 12))
NAMESPACE = st.sampled_from([b"", b"", b"other"])
PICK = st.integers(0, 1 << 16)


def ints(values: object) -> I32:
    return np.array(values, np.int32)


def make(page_size: int, num_pages: int, eviction: str = "lru") -> RadixCachePolicy:
    return RadixCachePolicy(CacheContext(page_size, num_pages, RadixCachePolicy.Settings(eviction=eviction), lambda: 0))


class Row:
    def __init__(self, namespace: bytes, tokens: list[int], lease: Lease, own: list[int]) -> None:
        self.namespace, self.tokens, self.lease, self.own = namespace, tokens, lease, own


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        num_pages=st.sampled_from([6, 14, 40, 40]),
        eviction=st.sampled_from(["lru", "lfu"]),
    )
    def start(self, page_size: int, num_pages: int, eviction: str) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.cache = make(page_size, num_pages, eviction)
        self.lfu = eviction == "lfu"
        self.ledger = PageLedger(num_pages, self.cache)
        self.page_of: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.hits: dict[Key, int] = {}  # leases; a page starts above the last that was given up
        self.gone = self.queries = self.hit_tokens = self.evicted = 0
        self.calls = 0
        self.rows: list[Row] = []
        self.step = 0

    # ---------------------------------------------------------------------------------------------------- the model

    def keys(self, tokens: list[int], namespace: bytes) -> list[Key]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def cached(self, tokens: list[int], namespace: bytes) -> list[Key]:
        """Longest cached prefix."""
        found: list[Key] = []
        for key in self.keys(tokens, namespace):
            if key not in self.page_of:
                break
            found.append(key)
        return found

    def leased(self, keys: list[Key]) -> None:
        """A lookup that found these."""
        self.touch(keys)
        self.queries += 1
        self.hit_tokens += len(keys) * self.page_size
        for key in keys:
            self.hits[key] += 1

    def touch(self, keys: list[Key]) -> None:
        self.calls += 1
        self.used.update(dict.fromkeys(keys, self.calls))

    def pinned(self) -> set[int]:
        return {page for row in self.rows for page in row.lease.pages().tolist()}

    def next_victim(self) -> Key | None:
        """Least recently (or frequently) used among the unpinned prefixes that nothing cached goes beyond."""
        pinned = self.pinned()
        longer = {(ns, tokens[: -self.page_size]) for ns, tokens in self.page_of}
        ends = [k for k, page in self.page_of.items() if k not in longer and page not in pinned]
        return min(ends, key=lambda k: (self.hits[k] if self.lfu else 0, self.used[k]), default=None)

    def expect_evicted(self, before: set[int], at_least: int) -> None:
        """The cache gave up exactly what the model would, page by page."""
        gone = before - set(self.cache.owned().tolist())
        assert len(gone) == at_least
        for _ in range(at_least):
            key = self.next_victim()
            assert key is not None
            assert self.page_of[key] in gone
            self.gone = self.hits[key]
            del self.page_of[key], self.used[key], self.hits[key]

    def take(self, k: int) -> list[int] | None:
        before, free, room = set(self.cache.owned().tolist()), self.ledger.free, self.ledger.room
        pages = self.ledger.take(k)
        assert (pages is None) == (k > room)
        short = 0 if pages is None else max(0, k - free)
        self.evicted += short
        self.expect_evicted(before, short)
        return None if pages is None else pages.tolist()

    def insert(self, row: Row) -> None:
        """Insert all full pages of the row; its duplicates go back behind the current step."""
        tokens = row.tokens[: len(row.tokens) // self.page_size * self.page_size]
        k, leased = len(tokens) // self.page_size, row.lease.n_pages
        pages = [*row.lease.pages().tolist(), *row.own][:k]
        have = self.cached(tokens, row.namespace)
        given, given_pages, old = ints(tokens), ints(pages), row.lease
        ins = self.cache.insert(given, given_pages, old, row.namespace)
        given[:], given_pages[:] = 9, 9  # M8: the cache keeps copies
        for key, page in list(zip(self.keys(tokens, row.namespace), pages))[len(have) :]:
            self.page_of[key] = page
            self.hits[key] = self.gone + 1
        self.touch(self.keys(tokens, row.namespace))
        assert ins.canonical.tolist() == [self.page_of[key] for key in self.keys(tokens, row.namespace)]
        duplicates = [mine for mine, theirs in zip(pages, ins.canonical.tolist()) if mine != theirs]
        assert len(duplicates) == len(have) - leased
        self.ledger.give(ints(duplicates), self.step)
        row.lease, row.own = ins.lease, row.own[k - leased :]

    # -------------------------------------------------------------------------------------------------------- rules

    @rule(tokens=TOKENS, namespace=NAMESPACE)
    def match(self, tokens: list[int], namespace: bytes) -> None:
        assert self.cache.match(ints(tokens), namespace) == len(self.cached(tokens, namespace))

    @rule(tokens=TOKENS, namespace=NAMESPACE, insert=st.booleans())
    def admit(self, tokens: list[int], namespace: bytes, insert: bool) -> None:
        given = ints(tokens[:-1])
        lease = self.cache.lease(given, namespace)
        given[:] = 9
        found = self.cached(tokens[:-1], namespace)
        assert lease.pages().tolist() == [self.page_of[key] for key in found]
        self.leased(found)
        row = Row(namespace, tokens, lease, [])
        self.rows.append(row)
        own = self.take(-(-len(tokens) // self.page_size) - lease.n_pages)
        if own is None:
            self.rows.remove(row)
            self.cache.release(lease)
            return
        row.own = own
        if insert:
            self.insert(row)

    @rule(tokens=TOKENS, namespace=NAMESPACE)
    def use(self, tokens: list[int], namespace: bytes) -> None:
        """A short visit: only recency changes."""
        self.leased(self.cached(tokens, namespace))
        self.cache.release(self.cache.lease(ints(tokens), namespace))

    @precondition(lambda self: self.rows)
    @rule(pick=PICK, more=TOKENS)
    def grow_and_insert(self, pick: int, more: list[int]) -> None:
        row = self.rows[pick % len(self.rows)]
        tokens = row.tokens + more[:5]
        own = self.take(-(-len(tokens) // self.page_size) - row.lease.n_pages - len(row.own))
        if own is not None:
            row.tokens, row.own = tokens, row.own + own
            self.insert(row)

    @precondition(lambda self: self.rows)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        row = self.rows.pop(pick % len(self.rows))
        self.cache.release(row.lease)
        if not isinstance(row.lease, EmptyLease):
            with pytest.raises(CacheError, match="released or consumed before"):
                self.cache.release(row.lease)
            with pytest.raises(CacheError, match="released or consumed before"):
                self.cache.insert(ints(row.tokens), ints([]), row.lease, row.namespace)
        self.ledger.give(ints(row.own), self.step)

    @rule()
    def step_done(self) -> None:
        self.ledger.retire(self.step)
        self.step += 1

    @rule(n=st.sampled_from([0, 1, 1, 2, 3, 12]))
    def evict(self, n: int) -> None:
        before, evictable = set(self.cache.owned().tolist()), self.cache.stats().evictable
        pages = self.cache.evict(n)
        self.evicted += len(pages)
        assert len(pages) == len(set(pages.tolist())) == (n if n <= evictable else 0)
        self.expect_evicted(before, len(pages))
        self.ledger.give(pages, -1)

    @rule()
    def clear(self) -> None:
        before, evictable = set(self.cache.owned().tolist()), self.cache.stats().evictable
        assert self.ledger.clear_cache() == evictable
        self.expect_evicted(before, evictable)

    # --------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "cache"):
            return
        owned = self.cache.owned().tolist()
        assert sorted(owned) == sorted(self.page_of.values())
        rows = [page for row in self.rows for page in row.own]
        held, free = self.ledger.held_pages().tolist(), self.ledger.free_pages().tolist()
        assert sorted([*owned, *rows, *held, *free]) == list(range(self.num_pages))

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        stats, pinned = self.cache.stats(), self.pinned()
        assert (stats.locked, stats.evictable) == (len(pinned), len(self.page_of) - len(pinned))
        assert stats.nodes == sum(1 for _ in self.cache._walk())
        counted = (stats.queries, stats.hit_tokens, stats.evicted_pages)
        assert counted == (self.queries, self.hit_tokens, self.evicted)

    def teardown(self) -> None:
        """S3: when nothing runs, free + evictable + locked = total."""
        if not hasattr(self, "cache"):
            return
        while self.rows:
            self.finish(0)
        self.step_done()
        stats = self.cache.stats()
        assert stats.locked == self.ledger.held == 0
        assert self.ledger.free + stats.evictable == self.num_pages
        self.clear()
        assert self.ledger.free == self.num_pages
        assert self.cache._roots == {}


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_lookup_ends_where_it_splits_a_node() -> None:
    """The rest of the node must not be taken for a child that follows: the text repeats with the period of a page."""
    cache = make(1, 10)
    cache.insert(ints([1, 0, 0, 0]), ints([0, 1, 2, 3]), EmptyLease(), b"")
    cache.insert(ints([1, 0, 0, 1]), ints([0, 1, 2, 4]), EmptyLease(), b"")
    for tokens, pages in (([1, 0, 1], [0, 1]), ([1, 0, 0, 1, 1], [0, 1, 2, 4])):
        assert cache.match(ints(tokens), b"") == len(pages)
        assert cache.lease(ints(tokens), b"").pages().tolist() == pages


def test_eviction_takes_the_end_of_the_least_recently_used_prefix() -> None:
    cache = make(2, 10)
    for tokens, pages in (([1, 1, 2, 2, 3, 3], [0, 1, 2]), ([5, 5, 6, 6], [3, 4])):
        cache.release(cache.insert(ints(tokens), ints(pages), EmptyLease(), b"").lease)
    cache.release(cache.lease(ints([1, 1]), b""))  # its first page is used again, not the two after it
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(1).tolist() == [1]
    assert sorted(cache.evict(2).tolist()) == [3, 4]
    assert cache.evict(1).tolist() == [0]


def test_lfu_keeps_what_is_leased_most_and_forgets_old_fame() -> None:
    cache = make(1, 10, "lfu")
    for token, leases in ((1, 5), (2, 0), (3, 1)):
        cache.release(cache.insert(ints([token]), ints([token]), EmptyLease(), b"").lease)
        for _ in range(leases):
            cache.release(cache.lease(ints([token]), b""))
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(1).tolist() == [3]
    kept = []
    for token in range(4, 12):  # newcomers, none of them ever leased
        cache.release(cache.insert(ints([token]), ints([2]), EmptyLease(), b"").lease)
        cache.evict(1)
        kept.append(cache.match(ints([1]), b""))
    assert kept == [1, 1, 1, 0, 0, 0, 0, 0], "it counts 6; the newcomers begin at 3, 4, 5 and 6"


def test_an_unlocked_path_is_unlocked_up_to_the_root() -> None:
    """M6: lock counts from the matched node up, unlock mirrors it exactly, also across a split between them."""
    cache = make(1, 10)
    lease = cache.insert(ints([1, 2, 3, 4]), ints([0, 1, 2, 3]), EmptyLease(), b"").lease
    inner = cache.lease(ints([1, 2]), b"")  # splits the locked node
    assert (cache.stats().locked, cache.stats().evictable) == (4, 0)
    cache.release(lease)
    assert (cache.stats().locked, cache.stats().evictable) == (2, 2)
    assert sorted(cache.evict(2).tolist()) == [2, 3]
    assert cache.evict(1).tolist() == []
    cache.release(inner)
    assert cache.evict(2).tolist() != []


def test_a_node_keeps_copies_of_what_it_is_given() -> None:
    """M8: an index buffer that is reused later does not change the cache."""
    cache = make(2, 10)
    tokens, pages = ints([1, 2, 3, 4]), ints([7, 8])
    cache.insert(tokens, pages, EmptyLease(), b"")
    tokens[:], pages[:] = 0, 0
    assert cache.lease(ints([1, 2, 3, 4]), b"").pages().tolist() == [7, 8]
    with pytest.raises(ValueError, match="read-only"):
        cache.lease(ints([1, 2, 3, 4]), b"").pages()[0] = 5


def test_a_namespace_that_is_empty_again_leaves_nothing_behind() -> None:
    cache = make(1, 10)
    for salt in range(50):
        cache.release(cache.insert(ints([1]), ints([0]), EmptyLease(), str(salt).encode()).lease)
        cache.evict(1)
    assert cache._roots == {}
    assert cache.stats().nodes == 0


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    cache = make(1, 10)
    cache.release(cache.insert(ints([1, 2]), ints([0, 1]), EmptyLease(), b"").lease)
    for _ in range(1000):
        cache.release(cache.lease(ints([1, 2]), b""))
    assert len(cache._heap) < 100
    assert sorted(cache.evict(2).tolist()) == [0, 1]


def test_pages_without_all_their_tokens_are_refused() -> None:
    cache = make(4, 10)
    with pytest.raises(CacheError, match="2 pages of 4 tokens were given with 7 tokens; expected 8"):
        cache.insert(ints(range(7)), ints([0, 1]), EmptyLease(), b"")
    assert len(cache.owned()) == 0


def test_an_insert_with_a_used_lease_changes_nothing() -> None:
    cache = make(1, 10)
    lease = cache.insert(ints([1]), ints([0]), EmptyLease(), b"").lease
    cache.release(lease)
    with pytest.raises(CacheError, match=r"^insert with a lease that was released or consumed before$"):
        cache.insert(ints([1, 2]), ints([0, 1]), lease, b"")
    assert cache.owned().tolist() == [0]
    assert (cache.stats().locked, cache.stats().evictable) == (0, 1)


def test_a_lease_of_another_cache_is_refused() -> None:
    one, two = make(1, 4), make(1, 4)
    lease = one.insert(ints([1]), ints([0]), EmptyLease(), b"").lease
    with pytest.raises(CacheError, match="not of this cache"):
        two.release(lease)


def test_pages_are_free_only_when_their_fence_is_done() -> None:
    ledger = PageLedger(4, make(1, 4))
    pages = ledger.take(3)
    assert pages is not None
    ledger.give(pages[:1], fence=2)
    ledger.give(pages[1:], fence=1)
    assert (ledger.free, ledger.held, ledger.room) == (1, 3, 1)
    assert ledger.take(2) is None
    ledger.retire(1)
    assert (ledger.free, ledger.held) == (3, 1)
    ledger.retire(2)
    assert (ledger.free, ledger.held) == (4, 0)


def test_a_page_given_back_twice_is_an_error() -> None:
    ledger = PageLedger(4, make(1, 4))
    pages = ledger.take(2)
    assert pages is not None
    ledger.give(pages, fence=-1)
    with pytest.raises(AssertionError, match="free already"):
        ledger.give(pages, fence=-1)


class LyingCache(RadixCachePolicy):
    def evict(self, n_pages: int) -> I32:
        return super().evict(n_pages)[1:]


def test_a_cache_that_gives_up_too_little_is_named() -> None:
    ctx = CacheContext(1, 4, LyingCache.Settings(), lambda: 0)
    cache = LyingCache(ctx)
    ledger = PageLedger(2, cache)
    pages = ledger.take(2)
    assert pages is not None
    cache.release(cache.insert(ints([1, 2]), pages, EmptyLease(), b"").lease)
    with pytest.raises(CacheError, match=r"LyingCache\.evict\(2\) returned pages \[\d\]; expected at least 2"):
        ledger.take(2)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_order_stays_exact_while_the_eviction_queue_is_cleaned_up(eviction: str) -> None:
    """Every lookup leaves an entry behind that no longer holds; the order must survive that they are thrown out."""
    rng, n = Random(3), 40
    model = CacheModel(make(1, 64, eviction), 1, 64)
    page, seen = {}, dict.fromkeys(range(n), (0, 0))  # token -> (lookups that found it, when it was used last)
    for token in range(n):
        holder = model.lease([token], b"")
        own = model.take(1)
        assert own is not None
        holder.own = own
        model.insert(holder, [token])
        page[token] = holder.leased[0]
        model.release(holder)
    for when in range(1, 401):
        token = rng.randrange(n)
        model.release(model.lease([token], b""))
        seen[token] = seen[token][0] + 1, when
    order = sorted(range(n), key=lambda token: seen[token] if eviction == "lfu" else seen[token][1])
    untouched = [token for token in order if seen[token] == (0, 0)]
    assert [int(model.cache.evict(1)[0]) for _ in range(n)] == [page[t] for t in [*untouched, *order[len(untouched) :]]]


def given_up(model: CacheModel) -> int:
    """The next page to be evicted, which is."""
    before = set(model.content)
    assert model.evict(1)
    [page] = before - set(model.content)
    return page


@pytest.mark.parametrize("child_first", [False, True])
def test_a_node_above_others_goes_after_them_though_the_queue_was_cleaned_up_between(child_first: bool) -> None:
    """1-2 and 1-3 share the node of 1. Lookups of 9 fill the queue with entries that no longer hold."""
    model = CacheModel(make(1, 8), 1, 8)
    page: dict[int, int] = {}
    held = []
    for tokens in ([1, 2], [1, 3]):
        holder = model.lease(tokens, b"")
        own = model.take(2 - len(holder.leased))
        assert own is not None
        holder.own = own
        model.insert(holder, tokens)
        page |= dict(zip(tokens, holder.leased, strict=True))
        held.append(holder)
    for holder in held:
        model.release(holder)
    other = model.lease([9], b"")
    own = model.take(1)
    assert own is not None
    other.own = own
    model.insert(other, [9])
    page[9] = other.leased[0]
    model.release(other)
    out = [given_up(model)] if child_first else []
    for _ in range(200):
        model.release(model.lease([9], b""))
    out += [given_up(model) for _ in range(4 - len(out))]
    assert out == [page[2], page[3], page[1], page[9]]
