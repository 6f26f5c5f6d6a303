"""The page ledger: which pages are free, and which become free when a step is done."""

from __future__ import annotations

import numpy as np

from minisgl.base.errors import CacheError
from minisgl.base.types import I32, NO_PAGES
from minisgl.sched.blame import blamed, call
from minisgl.sched.cache import CachePolicy


class PageLedger:
    """Owns the FREE and the HELD pages; the others belong to a row or to the cache.

        |-- FREE: take() hands them out --|-- HELD: given back, free once their fence step is done --|

    ``version`` changes whenever the cache may answer ``match`` differently.
    """

    def __init__(self, num_pages: int, cache: CachePolicy) -> None:
        self._cache = cache
        self._stack: I32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # [num_pages]; the first _n are free
        self._n = num_pages
        self._is_free = np.ones(num_pages, np.bool_)
        self._held: list[tuple[int, I32]] = []
        self._done = -1
        self.version = 0

    @property
    def free(self) -> int:
        """Free pages."""
        return self._n

    @property
    def held(self) -> int:
        """Pages that wait for their fence."""
        return sum(len(pages) for _, pages in self._held)

    @property
    def room(self) -> int:
        """Pages that ``take`` can hand out now: the free ones and those the cache can give up."""
        return self._n + self._cache.stats().evictable

    def take(self, k: int) -> I32 | None:
        """Hand out ``k`` pages, evicting cached ones if too few are free.

        Returns: [k] int32 page ids, now the caller's; None, and nothing changed, if there is no room.
        Raises: CacheError if the cache policy gives up fewer pages than it said it could, or foreign ones.
        """
        if k <= 0:
            return NO_PAGES
        if k > self._n:
            short = k - self._n
            if short > self._cache.stats().evictable:
                return None
            self._evict(short)
        self._n -= k
        pages = self._stack[self._n : self._n + k].copy()
        self._is_free[pages] = False
        return pages

    def give(self, pages: I32, fence: int) -> None:
        """Take ``pages`` back; they are free once step ``fence``, the last that may touch them, is done."""
        if not len(pages):
            return
        if fence <= self._done:
            self._push(pages)
        else:
            self._held.append((fence, pages))

    def retire(self, done_step: int) -> None:
        """Steps up to ``done_step`` are done: free what waited for them."""
        self._done = done_step
        if not self._held:
            return
        for fence, pages in self._held:
            if fence <= done_step:
                self._push(pages)
        self._held = [(fence, pages) for fence, pages in self._held if fence > done_step]

    def clear_cache(self) -> int:
        """Let the cache give up all it can. Returns: the number of pages."""
        pages = call(self._cache.clear)
        self.version += 1
        self._push(pages)
        return len(pages)

    def free_pages(self) -> I32:
        """The free pages, in any order. For audits."""
        return self._stack[: self._n].copy()

    def held_pages(self) -> I32:
        """The held pages, in any order. For audits."""
        return np.concatenate([NO_PAGES, *(pages for _, pages in self._held)])

    def _evict(self, short: int) -> None:
        pages = call(self._cache.evict, short)
        self.version += 1
        if len(pages) < short or self._is_free[pages].any():
            raise CacheError(
                f"{blamed(self._cache.evict)}({short}) returned pages {pages.tolist()!r}; "
                f"expected at least {short} pages that the cache owns"
            )
        self._push(pages)

    def _push(self, pages: I32) -> None:
        assert not self._is_free[pages].any(), f"pages {pages.tolist()} given back, free already: {self.free_pages()}"
        n = self._n + len(pages)
        self._stack[self._n : n] = pages
        self._is_free[pages] = True
        self._n = n
