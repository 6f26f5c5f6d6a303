"""A prefix cache that gives up what was used least often."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from pydantic import Field

from minisgl.api import (
    I32,
    NO_PAGES,
    CacheContext,
    CacheError,
    CachePolicy,
    CacheStats,
    EmptyLease,
    Inserted,
    Lease,
    PluginSettings,
)


class Entry:
    """One cached page. ``pins``: leases that go through it. ``queued``: the ``uses`` it waits for eviction with, or -1."""

    __slots__ = ("children", "key", "number", "page", "parent", "pins", "queued", "uses")

    def __init__(self, key: tuple[bytes, int, bytes], page: int, parent: Entry | None, number: int) -> None:
        self.key, self.page, self.parent, self.number = key, page, parent, number
        self.children = self.pins = self.uses = 0
        self.queued = -1


class LFULease(Lease):
    __slots__ = ("_pages", "entries", "live", "n_pages", "owner")

    def __init__(self, owner: LFUCachePolicy, entries: list[Entry]) -> None:
        self.owner, self.entries, self.n_pages, self.live = owner, entries, len(entries), True
        self._pages = np.array([e.page for e in entries], np.int32)
        self._pages.flags.writeable = False

    def pages(self) -> I32:
        return self._pages


class LFUCachePolicy(CachePolicy):
    """Pages are found by what precedes them and their tokens; the least used goes first, of equals the oldest.

    A page with successors stays until they are gone, since they could not be found without it.
    """

    class Settings(PluginSettings):
        most_uses: int = Field(255, ge=1, description="uses counted of a page at most, so that old favourites can go")

    def __init__(self, ctx: CacheContext) -> None:
        self._page_size = ctx.page_size
        self._most_uses: int = ctx.settings.most_uses
        self._entries: dict[tuple[bytes, int, bytes], Entry] = {}
        self._heap: list[tuple[int, int, Entry]] = []  # (uses, number, entry)
        self._numbers = 0
        self._locked = 0

    def match(self, tokens: I32, namespace: bytes) -> int:
        return sum(1 for _ in self._walk(tokens, namespace))

    def lease(self, tokens: I32, namespace: bytes) -> Lease:
        return self._pin(list(self._walk(tokens, namespace)))

    def release(self, lease: Lease) -> None:
        if isinstance(lease, EmptyLease):
            return
        self._consume(lease)
        for entry in reversed(lease.entries):
            entry.pins -= 1
            if not entry.pins:
                self._locked -= 1
                self._enqueue(entry)

    def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
        if not isinstance(lease, EmptyLease) and not (isinstance(lease, LFULease) and lease.live):
            raise CacheError("insert with a lease that is not of this cache, or was used up before")
        path = list(self._walk(tokens[: len(pages) * self._page_size], namespace))
        for i in range(len(path), len(pages)):
            parent = path[-1] if path else None
            self._numbers += 1
            entry = Entry(self._key(tokens, i, parent, namespace), int(pages[i]), parent, self._numbers)
            self._entries[entry.key] = entry
            if parent is not None:
                parent.children += 1
            path.append(entry)
        new = self._pin(path)
        self.release(lease)
        return Inserted(new, new.pages())

    def evict(self, n_pages: int) -> I32:
        if n_pages <= 0 or n_pages > len(self._entries) - self._locked:
            return NO_PAGES
        given: list[int] = []
        while len(given) < n_pages:
            uses, _, entry = heappop(self._heap)
            if entry.queued != uses or entry.pins or entry.children:
                continue  # it was used since, or got a successor
            entry.queued = -1
            del self._entries[entry.key]
            given.append(entry.page)
            if entry.parent is not None:
                entry.parent.children -= 1
                self._enqueue(entry.parent)
        return np.array(given, np.int32)

    def stats(self) -> CacheStats:
        return CacheStats(len(self._entries) - self._locked, self._locked, len(self._entries))

    def owned(self) -> I32:
        return np.array([e.page for e in self._entries.values()], np.int32)

    def clear(self) -> I32:
        return self.evict(len(self._entries) - self._locked)

    def _key(self, tokens: I32, i: int, parent: Entry | None, namespace: bytes) -> tuple[bytes, int, bytes]:
        of_page = tokens[i * self._page_size : (i + 1) * self._page_size].tobytes()
        return namespace, parent.number if parent is not None else 0, of_page

    def _walk(self, tokens: I32, namespace: bytes) -> Iterator[Entry]:
        """The cached pages along ``tokens``."""
        parent = None
        for i in range(len(tokens) // self._page_size):
            parent = self._entries.get(self._key(tokens, i, parent, namespace))
            if parent is None:
                return
            yield parent

    def _pin(self, path: list[Entry]) -> Lease:
        if not path:
            return EmptyLease()
        for entry in path:
            entry.uses = min(entry.uses + 1, self._most_uses)
            entry.queued = -1
            self._locked += not entry.pins
            entry.pins += 1
        return LFULease(self, path)

    def _consume(self, lease: Lease) -> None:
        if not isinstance(lease, LFULease) or lease.owner is not self:
            raise CacheError(f"lease {lease!r} is not of this cache")
        if not lease.live:
            raise CacheError(f"lease of {lease.n_pages} pages was released or consumed before; each is used up once")
        lease.live = False

    def _enqueue(self, entry: Entry) -> None:
        """``entry`` may have become one that can be given up."""
        if not entry.pins and not entry.children and entry.queued != entry.uses:
            entry.queued = entry.uses
            heappush(self._heap, (entry.uses, entry.number, entry))
