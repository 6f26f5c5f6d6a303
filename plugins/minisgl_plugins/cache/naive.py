"""No prefix cache: every prompt is computed from its first token."""

from __future__ import annotations

from minisgl.api import I32, NO_PAGES, CacheContext, CachePolicy, CacheStats, EmptyLease, Inserted, Lease


class NaiveCachePolicy(CachePolicy):
    """Keeps nothing."""

    def __init__(self, ctx: CacheContext) -> None:
        self._lease = EmptyLease()
        self._queries = 0

    def match(self, tokens: I32, namespace: bytes) -> int:
        return 0

    def lease(self, tokens: I32, namespace: bytes) -> Lease:
        self._queries += 1
        return self._lease

    def release(self, lease: Lease) -> None:
        pass

    def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
        return Inserted(self._lease, NO_PAGES)

    def evict(self, n_pages: int) -> I32:
        return NO_PAGES

    def stats(self) -> CacheStats:
        return CacheStats(evictable=0, locked=0, queries=self._queries)

    def owned(self) -> I32:
        return NO_PAGES

    def clear(self) -> I32:
        return NO_PAGES
