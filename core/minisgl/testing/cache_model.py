"""A cache policy and a brute-force model of it side by side: what any policy must do, checked call by call."""

from __future__ import annotations

from collections import Counter

import numpy as np

from minisgl.base.errors import CacheError
from minisgl.base.types import I32
from minisgl.sched.cache import CachePolicy, EmptyLease, Lease

Prefix = tuple[bytes, bytes]  # namespace, tokens up to the end of a page


def ints(values: object) -> I32:
    return np.array(values, np.int32)


class Holder:
    """A row: its tokens, the lease, and its own pages after the leased ones."""

    def __init__(self, tokens: list[int], namespace: bytes, lease: Lease) -> None:
        self.tokens, self.namespace = tokens, namespace
        self.hold(lease)
        self.own: list[int] = []

    def hold(self, lease: Lease) -> None:
        self.lease, self.leased = lease, lease.pages().tolist()


class CacheModel:
    """Calls ``cache`` and checks every answer against a dict of prefixes. Every buffer given to the cache is overwritten
    after the call. ``content``: page the cache owns -> the prefix it holds. ``trace``: all answers."""

    def __init__(self, cache: CachePolicy, page_size: int, num_pages: int) -> None:
        self.cache, self.page_size, self.num_pages = cache, page_size, num_pages
        self.free = list(range(num_pages))
        self.content: dict[int, Prefix] = {}
        self.holders: list[Holder] = []
        self.trace: list[object] = []

    def prefix(self, tokens: list[int], page: int, namespace: bytes) -> Prefix:
        return namespace, ints(tokens[: (page + 1) * self.page_size]).tobytes()

    def match(self, tokens: list[int], namespace: bytes) -> int:
        given = ints(tokens)
        n = self.cache.match(given, namespace)
        given[:] = -7
        again = self.cache.match(ints(tokens), namespace)
        assert n == again, f"match says {n}, then {again}"
        assert 0 <= n <= len(tokens) // self.page_size, f"match says {n} pages of {len(tokens)} tokens"
        pinned = [h for h in self.holders if h.namespace == namespace and h.leased]
        for h in pinned:
            common = self._common(h.tokens[: len(h.leased) * self.page_size], tokens)
            assert n >= common, f"match says {n}, a lease pins {common} pages of it"
        self.trace.append(("match", n))
        return n

    def lease(self, tokens: list[int], namespace: bytes) -> Holder:
        n = self.match(tokens, namespace)
        given = ints(tokens)
        lease = self.cache.lease(given, namespace)
        given[:] = -7
        assert lease.n_pages == n, f"lease covers {lease.n_pages} pages, match said {n}"
        holder = Holder(list(tokens), namespace, lease)
        self._check_pages(holder, holder.leased)
        self.holders.append(holder)
        self.trace.append(("lease", holder.leased))
        self.check()
        return holder

    def take(self, k: int) -> list[int] | None:
        """Pages for a row, evicting if too few are free."""
        if k > len(self.free) and not self.evict(k - len(self.free)):
            return None
        taken, self.free = self.free[:k], self.free[k:]
        return taken

    def insert(self, holder: Holder, tokens: list[int]) -> None:
        """Give the full pages of ``tokens``, which begin with the leased ones, to the cache; the row holds the new lease."""
        k = len(tokens) // self.page_size
        old = len(holder.leased)
        pages = [*holder.leased, *holder.own][:k]
        assert len(pages) == k, f"the test has {len(pages)} pages for {k}"
        consumed = holder.lease
        given, given_pages = ints(tokens), ints(pages)
        ins = self.cache.insert(given, given_pages, consumed, holder.namespace)
        given[:], given_pages[:] = -7, -7
        canonical = ins.canonical.tolist()
        n = len(canonical)
        assert old <= n <= k, f"insert of {k} pages, {old} of them leased, kept {n}"
        assert ins.lease.n_pages == n, f"insert kept {n} pages, its lease covers {ins.lease.n_pages}"
        assert ins.lease.pages().tolist() == canonical, f"lease {ins.lease.pages()} != canonical {canonical}"
        holder.tokens = list(tokens)
        holder.hold(ins.lease)
        kept: list[int] = []
        for i, (mine, theirs) in enumerate(zip(pages, canonical)):
            if mine == theirs:
                self.content.setdefault(mine, self.prefix(tokens, i, holder.namespace))
            else:
                assert i >= old, f"leased page {mine} was replaced by {theirs}"
                kept.append(mine)
        self.free += kept
        holder.own = holder.own[n - old :]
        self._check_pages(holder, canonical)
        if old and not isinstance(consumed, EmptyLease):
            self._refuses(consumed)
        self.trace.append(("insert", canonical))
        self.check()

    def release(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.cache.release(holder.lease)
        if not isinstance(holder.lease, EmptyLease):
            self._refuses(holder.lease)
        self.free += holder.own
        self.check()

    def evict(self, n: int) -> bool:
        """Returns: whether the cache gave up ``n`` pages or more."""
        before, evictable = sorted(self.cache.owned().tolist()), self.cache.stats().evictable
        out = self.cache.evict(n).tolist()
        if n == 0 or n > evictable:
            assert out == [], f"evict({n}) with {evictable} evictable pages gave {out}"
            assert sorted(self.cache.owned().tolist()) == before, "evict gave nothing and changed the cache"
        else:
            assert len(out) >= n, f"evict({n}) with {evictable} evictable pages gave {out}"
        self._given_up(out)
        self.trace.append(("evict", out))
        self.check()
        return len(out) >= n

    def clear(self) -> None:
        evictable = self.cache.stats().evictable
        out = self.cache.clear().tolist()
        assert len(out) == evictable, f"clear gave up {len(out)} pages, {evictable} were evictable"
        self._given_up(out)
        self.trace.append(("clear", out))
        self.check()

    def check(self) -> None:
        """Who owns which page, and the cache's own counts."""
        owned = self.cache.owned().tolist()
        assert sorted(owned) == sorted(self.content), f"cache owns {sorted(owned)}, expected {sorted(self.content)}"
        stats = self.cache.stats()
        assert stats.evictable + stats.locked == len(owned), f"{stats} of {len(owned)} pages"
        pinned = self.pinned()
        assert stats.locked >= len(pinned), f"{stats.locked} locked pages, leases pin {len(pinned)}"
        for h in self.holders:
            assert h.lease.pages().tolist() == h.leased, f"leased pages changed from {h.leased} to {h.lease.pages()}"
        rows = [p for h in self.holders for p in h.own]
        count = Counter([*self.free, *self.content, *rows])
        assert len(count) == self.num_pages, f"{len(count)} of {self.num_pages} pages have an owner"
        assert max(count.values()) == 1, f"pages with several owners: {[p for p, n in count.items() if n > 1]}"

    def pinned(self) -> set[int]:
        return {p for h in self.holders for p in h.leased}

    def _given_up(self, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages), f"a page was given up twice: {pages}"
        for page in pages:
            assert page in self.content, f"page {page} was given up, the cache did not own it"
            assert page not in self.pinned(), f"page {page} was given up, a lease pins it"
            del self.content[page]
        self.free += pages

    def _check_pages(self, holder: Holder, pages: list[int]) -> None:
        for i, page in enumerate(pages):
            want = self.prefix(holder.tokens, i, holder.namespace)
            assert self.content.get(page) == want, f"page {page} is not page {i} of this prefix and namespace"

    def _refuses(self, lease: Lease) -> None:
        try:
            self.cache.release(lease)
        except CacheError:
            return
        raise AssertionError("a lease was released twice and the cache did not raise CacheError")

    def _common(self, a: list[int], b: list[int]) -> int:
        """Full pages that both begin with."""
        n = 0
        while (n + 1) * self.page_size <= min(len(a), len(b)):
            end = (n + 1) * self.page_size
            if a[n * self.page_size : end] != b[n * self.page_size : end]:
                break
            n += 1
        return n
