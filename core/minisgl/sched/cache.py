"""The cache policy: which prefixes' pages are kept, found and given up. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from minisgl.base.component import Component
from minisgl.base.types import I32, NO_PAGES


@dataclass(frozen=True, slots=True)
class CacheContext:
    """``page_size``: tokens per page. ``num_pages``: pages of the whole pool. ``clock``: the logical step, not time."""

    page_size: int
    num_pages: int
    settings: Any
    clock: Callable[[], int]


class Lease:
    """Receipt of a pinned prefix; policies subclass it. ``n_pages``: pages of the prefix."""

    __slots__ = ()
    n_pages: int

    def pages(self) -> I32:
        """Page ids of the leased prefix in order, [n_pages] int32; stable until release."""
        raise NotImplementedError


class EmptyLease(Lease):
    """A lease of nothing. Releasing it any number of times is allowed."""

    __slots__ = ()
    n_pages = 0

    def pages(self) -> I32:
        return NO_PAGES


class Inserted(NamedTuple):
    """``canonical``: [k] int32, the cache's page for each page given; where it differs from the caller's page, the caller
    keeps its own (a duplicate). It may be shorter than what was given, but not than the leased part: the policy does not
    keep the rest, which stays the caller's. ``lease`` pins the canonical pages."""

    lease: Lease
    canonical: I32


@dataclass(frozen=True, slots=True)
class CacheStats:
    """``evictable`` and ``locked``: pages, together all that the cache owns. ``nodes``: of the index.

    Totals since the start, 0 where a policy does not count: ``queries``: leases; ``hit_tokens``: tokens that they covered;
    ``evicted_pages``: pages given up by ``evict``.
    """

    evictable: int
    locked: int
    nodes: int = 0
    queries: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


class CachePolicy(Component):
    """Owns pages of finished prefixes and an order in which to give them up.

    Rules: only full pages are given; copy what you keep, since inputs are views of live buffers; be deterministic given the
    sequence of calls; namespaces never share pages; no torch and no I/O. All calls come from the engine thread.
    Cost: match, lease, insert O(tokens); stats O(1); evict O(evicted log n).
    """

    stability: ClassVar[Literal["stable", "experimental"]] = "stable"

    @abstractmethod
    def __init__(self, ctx: CacheContext) -> None: ...

    @abstractmethod
    def match(self, tokens: I32, namespace: bytes) -> int:
        """Pages that a lease of ``tokens`` would cover now. No visible effect (recency included)."""

    @abstractmethod
    def lease(self, tokens: I32, namespace: bytes) -> Lease:
        """Pin the longest cached prefix of ``tokens``, in whole pages; may be empty."""

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Unpin. Raises: CacheError if this lease was released or consumed before."""

    @abstractmethod
    def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
        """Take over the KV of ``tokens[:len(pages) * page_size]``, stored in ``pages``.

        Args: tokens: [>= len(pages) * page_size] int32. pages: [k] int32, page i holds tokens [i*page_size, (i+1)*page_size);
            the first ``lease.n_pages`` are the leased ones. lease: consumed; the returned one replaces it.
        Returns: a lease that pins all k pages (or the first of them, see Inserted), and the canonical page of each. ``canonical[i] == pages[i]``: the cache
            adopted it, or owned it already.
        """

    @abstractmethod
    def evict(self, n_pages: int) -> I32:
        """Give up unpinned pages.

        Args: n_pages: >= 0; 0 does nothing.
        Returns: [k] int32 page ids, now the caller's; k >= n_pages if that many are evictable, else [] and nothing changed.
        """

    @abstractmethod
    def stats(self) -> CacheStats:
        """O(1)."""

    @abstractmethod
    def owned(self) -> I32:
        """Every page the cache owns, in any order. For audits only."""

    @abstractmethod
    def clear(self) -> I32:
        """Give up all unpinned pages."""
