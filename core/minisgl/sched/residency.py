"""How pages move between the ledger, the rows and the cache. Every page has exactly one owner:

    FREE --take--> ROW --insert--> CACHE --evict--> FREE          (HELD: given back, its fence step is not done yet)
                    `---give--> HELD --fence done--> FREE

A row may besides borrow pages of the cache through its lease: its table is |-- leased (CACHE) --|-- own (ROW) --|.
"""

from __future__ import annotations

import numpy as np

from minisgl.base.errors import CacheError
from minisgl.base.types import I32, Limits
from minisgl.sched.blame import blamed, call
from minisgl.sched.cache import CachePolicy, EmptyLease, Inserted, Lease
from minisgl.sched.pages import PageLedger
from minisgl.sched.request import Req
from minisgl.sched.rows import Rows


class Residency:
    """Opens, extends and closes rows; inserts what they computed into the cache. ``keeps``: the cache kept what it was given last."""

    def __init__(self, limits: Limits, cache: CachePolicy) -> None:
        self.page_size = limits.page_size
        self.cache = cache
        self.ledger = PageLedger(limits.num_pages, cache)
        self.rows = Rows(limits)
        self.keeps = True

    def matched(self, r: Req) -> int:
        """Pages of ``r`` that the cache holds now and may be used. The last token never counts: it must be computed to be
        continued."""
        if r.scores:
            return 0
        if r.matched is None or r.matched[0] != self.ledger.version:
            r.matched = self.ledger.version, call(self.cache.match, r.ids[:-1], r.namespace)
        return r.matched[1]

    def lease(self, r: Req) -> Lease:
        if r.scores:
            return EmptyLease()
        return call(self.cache.lease, r.ids[:-1], r.namespace)

    def release(self, lease: Lease) -> None:
        call(self.cache.release, lease)

    def open(self, r: Req, lease: Lease, pages: I32) -> None:
        """Give ``r`` a row with the pages of ``lease`` and new ``pages``; it goes into the next plan."""
        rows = self.rows
        slot = rows.open(r.uid, r.owner, r.ids, r.prompt_len, r.max_new)
        rows.kv[slot] = lease.n_pages * self.page_size
        rows.add_pages(slot, lease.pages())
        rows.add_pages(slot, pages)
        r.slot, r.lease = slot, lease
        rows.announce(slot, r.ids[rows.kv[slot] :], r.sampling)

    def extend(self, r: Req, pages: I32) -> None:
        """Append ``pages`` to the row of ``r``."""
        self.rows.tell_pages(r.row, self.rows.add_pages(r.row, pages), pages)

    def insert(self, r: Req, tokens: I32, fence: int) -> None:
        """Give the full pages of the row's first ``tokens`` to the cache.

        Where the cache has the page already, the row reads the cache's page from the next plan on, and its own copy is
        free after step ``fence``, the last that touches it.
        """
        slot, k = r.row, len(tokens) // self.page_size
        if k <= r.lease.n_pages:
            return
        mine = self.rows.pages(slot)[:k].copy()
        old = r.lease.n_pages
        ins = call(self.cache.insert, tokens[: k * self.page_size], mine.copy(), r.lease, r.namespace)
        n = self._checked(ins, mine, old)
        r.lease = ins.lease
        self.keeps = n == k
        self.ledger.version += 1
        duplicate = np.flatnonzero(ins.canonical != mine[:n]).astype(np.int32)
        if len(duplicate):
            self.rows.repoint(slot, duplicate, ins.canonical[duplicate])
            self.ledger.give(mine[duplicate], fence)

    def close(self, r: Req, keep: bool) -> None:
        """Take the row of ``r`` away; its last step must be done. ``keep``: insert what completed steps computed."""
        rows, slot = self.rows, r.row
        fence = int(rows.last[slot])
        if keep:
            # The KV of the last sampled token is not there, or not to be counted on.
            valid = int(rows.prompt[slot] + rows.emitted[slot]) - 1
            self.insert(r, rows.tokens[slot, :valid], fence)
        self.release(r.lease)
        self.ledger.give(rows.pages(slot)[r.lease.n_pages :].copy(), fence)
        rows.close(slot)
        r.slot, r.lease = None, EmptyLease()

    def _checked(self, ins: Inserted, mine: I32, old: int) -> int:
        """Pages that the cache kept. Raises: CacheError if the answer breaks the contract."""
        n = len(ins.canonical)
        if old <= n <= len(mine) and n == ins.lease.n_pages and np.array_equal(ins.canonical[:old], mine[:old]):
            return n
        raise CacheError(
            f"{blamed(self.cache.insert)}() of {len(mine)} pages, {old} of them leased, returned {n} canonical pages and a "
            f"lease of {ins.lease.n_pages}; expected as many of each, the leased pages first and unchanged"
        )
