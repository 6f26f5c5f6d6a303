"""Prefix cache as a radix tree over pages; the least recently, or the least frequently, used leaves are given up first.

The idea is RadixAttention's (Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal

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

Rank = tuple[int, int]  # what goes first has the least


class Node:
    """An edge of the tree with its lower end: ``pages`` hold the KV of ``tokens``, page_size tokens each.

    ``pins``: leases that end here, and children that are pinned; the node is locked while there are any. ``rank``: (how
    often, by the policy's count, number of the last call) it was used; every call that pins it or gives it a child is such
    a use.
    """

    __slots__ = ("children", "pages", "parent", "pins", "rank", "tokens")

    def __init__(self, tokens: I32, pages: I32, parent: Node | None, rank: Rank) -> None:
        self.tokens, self.pages, self.parent = tokens, pages, parent
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.rank = rank


class Root(Node):
    """Top of a namespace's tree; has no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: bytes) -> None:
        super().__init__(NO_PAGES, NO_PAGES, None, (0, 0))
        self.namespace = namespace


class RadixLease(Lease):
    """Pins ``node`` and all above it. ``live`` until released or consumed."""

    __slots__ = ("_pages", "live", "n_pages", "node", "owner")

    def __init__(self, owner: RadixCachePolicy, node: Node, pages: I32) -> None:
        self.owner, self.node, self._pages, self.n_pages, self.live = owner, node, pages, len(pages), True

    def pages(self) -> I32:
        return self._pages


class RadixCachePolicy(CachePolicy):
    """One tree per namespace; nodes split at page borders; eviction trims leaves from their end.

    A node is evictable as soon as nothing pins it or what is below it. Leaves among the evictable wait in a heap ordered
    by rank; entries that no longer hold are skipped when they come up, and the heap is rebuilt when most are such.

    With ``lfu`` a page counts the leases of it, and starts at one more than the count of the last page given up, so that
    what was popular long ago does not stay for ever; among equal counts the least recently used goes first.
    """

    class Settings(PluginSettings):
        eviction: Literal["lru", "lfu"] = Field(
            "lru", description="give up the least recently or frequently used pages"
        )

    def __init__(self, ctx: CacheContext) -> None:
        self._lfu = ctx.settings.eviction == "lfu"
        self._page_size = ctx.page_size
        self._roots: dict[bytes, Root] = {}
        self._evictable = self._locked = self._nodes = 0
        self._calls = 0  # of lease and insert: the clock of recency
        self._pushes = 0
        self._heap: list[tuple[Rank, int, Node]] = []  # (rank, push number, node)
        self._gone = 0  # count of the last page given up
        self._queries = self._hit_pages = self._evicted = 0

    # ------------------------------------------------------------------------------------------------------- lookup

    def match(self, tokens: I32, namespace: bytes) -> int:
        root = self._roots.get(namespace)
        return 0 if root is None else sum(k for _, k in self._path(root, tokens))

    def lease(self, tokens: I32, namespace: bytes) -> Lease:
        self._calls += 1
        self._queries += 1
        root = self._roots.get(namespace)
        if root is None:
            return EmptyLease()
        node, n_pages = self._descend(root, tokens, int(self._lfu))
        self._hit_pages += n_pages
        return self._pinned(node)

    def release(self, lease: Lease) -> None:
        if isinstance(lease, EmptyLease):
            return
        if not isinstance(lease, RadixLease) or lease.owner is not self:
            raise CacheError(f"lease {lease!r} is not of this cache")
        if not lease.live:
            raise CacheError(f"lease of {lease.n_pages} pages was released or consumed before; each is used up once")
        lease.live = False
        self._unpin(lease.node)

    # -------------------------------------------------------------------------------------------------------- change

    def insert(self, tokens: I32, pages: I32, lease: Lease, namespace: bytes) -> Inserted:
        ps, k = self._page_size, len(pages)
        if len(tokens) < k * ps:
            raise CacheError(f"{k} pages of {ps} tokens were given with {len(tokens)} tokens; expected {k * ps}")
        if isinstance(lease, RadixLease) and not lease.live:
            raise CacheError("insert with a lease that was released or consumed before")
        self._calls += 1
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        node, have = self._descend(root, tokens[: k * ps])
        if have < k:
            node = self._attach(node, tokens[have * ps : k * ps].copy(), pages[have:].copy())
        self._drop_if_empty(root)
        new = self._pinned(node)
        self.release(lease)
        return Inserted(new, new.pages())

    def evict(self, n_pages: int) -> I32:
        pages = self._give_up(n_pages)
        self._evicted += len(pages)
        return pages

    def clear(self) -> I32:
        return self._give_up(self._evictable)

    def _give_up(self, n_pages: int) -> I32:
        if n_pages <= 0 or n_pages > self._evictable:
            return NO_PAGES
        out: list[I32] = []
        short = n_pages
        while short > 0:
            rank, _, leaf = self._heap[0]
            if not self._holds(self._heap[0]):
                heappop(self._heap)
                continue
            self._gone = rank[0]
            k = min(short, len(leaf.pages))
            out.append(leaf.pages[-k:])
            self._evictable -= k
            short -= k
            if k < len(leaf.pages):
                leaf.pages, leaf.tokens = leaf.pages[:-k], leaf.tokens[: -k * self._page_size]
            else:
                heappop(self._heap)
                self._remove(leaf)
        return np.concatenate(out)

    # -------------------------------------------------------------------------------------------------------- counts

    def stats(self) -> CacheStats:
        hits = self._hit_pages * self._page_size
        return CacheStats(self._evictable, self._locked, self._nodes, self._queries, hits, self._evicted)

    def owned(self) -> I32:
        return np.concatenate([NO_PAGES, *(n.pages for n in self._walk())])

    # ---------------------------------------------------------------------------------------------------------- tree

    def _path(self, root: Node, tokens: I32) -> Iterator[tuple[Node, int]]:
        """Nodes from below ``root`` along ``tokens``, each with how many of its pages match; the last may match in part."""
        ps, at, n_full = self._page_size, 0, len(tokens) // self._page_size
        node = root
        while at < n_full:
            child = node.children.get(tokens[at * ps : (at + 1) * ps].tobytes())
            if child is None:
                return
            n = min(len(child.pages), n_full - at)
            same = child.tokens[: n * ps] == tokens[at * ps : (at + n) * ps]
            k = n if same.all() else int(same.argmin()) // ps
            ends = k < len(child.pages)  # looked at now: the caller may split the node
            yield child, k
            if ends:
                return
            node, at = child, at + k

    def _descend(self, root: Node, tokens: I32, hits: int = 0) -> tuple[Node, int]:
        """Where the cached prefix of ``tokens`` ends, and its pages. A node in which it ends is split there; the path was used
        in this call, and ``hits`` more often."""
        node, n_pages = root, 0
        for child, k in self._path(root, tokens):
            node = child if k == len(child.pages) else self._split(child, k)
            node.rank = node.rank[0] + hits, self._calls
            n_pages += k
        return node, n_pages

    def _split(self, node: Node, k: int) -> Node:
        """Cut ``node`` after its first ``k`` pages, 0 < k < all. Returns: the new upper part."""
        ps, parent = self._page_size, node.parent
        assert parent is not None, "a root has no pages to split"
        upper = Node(node.tokens[: k * ps], node.pages[:k], parent, node.rank)
        upper.pins = 1 if node.pins else 0  # its one child
        parent.children[self._key(upper)] = upper
        node.tokens, node.pages, node.parent = node.tokens[k * ps :], node.pages[k:], upper
        upper.children[self._key(node)] = node
        self._nodes += 1
        return upper

    def _attach(self, parent: Node, tokens: I32, pages: I32) -> Node:
        node = Node(tokens, pages, parent, (self._gone + 1 if self._lfu else 0, self._calls))
        parent.children[self._key(node)] = node
        self._nodes += 1
        self._evictable += len(pages)
        return node

    def _remove(self, leaf: Node) -> None:
        """Take an evicted leaf out of the tree; its parent may be the next to go."""
        parent = leaf.parent
        assert parent is not None, "a root has no pages to evict"
        del parent.children[self._key(leaf)]
        self._nodes -= 1
        if isinstance(parent, Root):
            self._drop_if_empty(parent)
        elif not parent.pins and not parent.children:
            self._enqueue(parent)

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children:
            del self._roots[root.namespace]

    def _key(self, node: Node) -> bytes:
        """What a node is found by among its siblings: its first page."""
        return node.tokens[: self._page_size].tobytes()

    def _walk(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ---------------------------------------------------------------------------------------------------------- pins

    def _pinned(self, node: Node) -> Lease:
        """A new lease of the path down to ``node``."""
        if node.parent is None:
            return EmptyLease()
        parts, at = [], node
        while at.parent is not None:
            parts.append(at.pages)
            at = at.parent
        pages = np.concatenate(parts[::-1])
        pages.flags.writeable = False
        self._pin(node)
        return RadixLease(self, node, pages)

    def _pin(self, node: Node) -> None:
        """Count a pin on ``node``; one that was not pinned before pins its parent."""
        while node.parent is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self._evictable -= len(node.pages)
            self._locked += len(node.pages)
            node = node.parent

    def _unpin(self, node: Node) -> None:
        """The mirror of ``_pin``."""
        while node.parent is not None:
            assert node.pins > 0, f"unpinned a node with {node.pins} pins"
            node.pins -= 1
            if node.pins:
                return
            self._evictable += len(node.pages)
            self._locked -= len(node.pages)
            if not node.children:
                self._enqueue(node)
            node = node.parent

    def _enqueue(self, leaf: Node) -> None:
        """``leaf`` can be evicted now. That happens once at a rank: what ends it is a use."""
        self._pushes += 1
        heappush(self._heap, (leaf.rank, self._pushes, leaf))
        if len(self._heap) > 2 * self._nodes + 64:
            self._heap = [e for e in self._heap if self._holds(e)]
            heapify(self._heap)

    def _holds(self, entry: tuple[Rank, int, Node]) -> bool:
        """Whether a heap entry still names an evictable leaf at its place."""
        rank, _, node = entry
        return rank == node.rank and not node.pins and not node.children
