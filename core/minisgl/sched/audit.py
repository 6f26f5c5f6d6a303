"""Checks of everything that must hold between two steps. For tests, and for ``engine.validate=audit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.base.types import ReqState
from minisgl.sched.rows import cdiv

if TYPE_CHECKING:
    from minisgl.sched.scheduler import Scheduler


def audit(s: Scheduler) -> None:
    """Raises: AssertionError that says what is wrong, with both values."""
    _pages(s)
    _slots(s)
    _order(s)
    for slot, r in s.by_slot.items():
        assert r.slot == slot, f"request {r.uid} has slot {r.slot}, the table says {slot}"
        _row(s, slot)
    _requests(s)


def _pages(s: Scheduler) -> None:
    """Each page has exactly one owner, and the cache counts its own rightly."""
    rows, ledger = s.residency.rows, s.residency.ledger
    owners = {
        "free": ledger.free_pages(),
        "held": ledger.held_pages(),
        "cache": s.cache.owned(),
    } | {f"row {slot}": rows.pages(slot)[r.lease.n_pages :] for slot, r in s.by_slot.items()}
    owner_of: dict[int, str] = {}
    for owner, pages in owners.items():
        for page in pages.tolist():
            assert page not in owner_of, f"page {page} is owned by {owner_of[page]} and by {owner}"
            owner_of[page] = owner
    every = set(range(s.limits.num_pages))
    assert owner_of.keys() == every, (
        f"pages without an owner: {every - owner_of.keys()}, unknown: {owner_of.keys() - every}"
    )
    stats, owned = s.cache.stats(), len(owners["cache"])
    assert stats.evictable + stats.locked == owned, (
        f"evictable {stats.evictable} + locked {stats.locked} != owned {owned}"
    )
    leased = {p for slot, r in s.by_slot.items() for p in rows.pages(slot)[: r.lease.n_pages].tolist()}
    assert stats.locked >= len(leased), f"cache says {stats.locked} locked pages, rows lease {len(leased)}"
    for page in leased:
        assert owner_of[page] == "cache", f"leased page {page} is owned by {owner_of[page]}"


def _slots(s: Scheduler) -> None:
    free, used = sorted(s.residency.rows.free_slots), sorted(s.by_slot)
    assert sorted(free + used) == list(range(s.limits.max_slots)), f"free slots {free}, used slots {used}"
    assert s.residency.rows.dead[free].all(), f"a free slot is not marked dead: {free}"


def _order(s: Scheduler) -> None:
    """The decode order holds exactly the rows that have a next token to decode, each once."""
    order = s.residency.rows.decoding.tolist()
    rows = s.residency.rows
    want = sorted(
        slot for slot, r in s.by_slot.items() if r.state is ReqState.DECODE and rows.kv[slot] < rows.end[slot]
    )
    assert sorted(order) == want, f"decode order {order}, rows that decode {want}"


def _row(s: Scheduler, slot: int) -> None:
    rows, r, ps = s.residency.rows, s.by_slot[slot], s.limits.page_size
    kv, n, end = int(rows.kv[slot]), int(rows.n_pages[slot]), r.prompt_len + r.max_new - 1
    assert kv <= n * ps, f"row {slot}: {kv} KV tokens in {n} pages of {ps}"
    assert kv <= end, f"row {slot}: {kv} KV tokens planned, at most {end} are needed"
    assert n <= cdiv(end, ps), f"row {slot}: {n} pages, {end} tokens need {cdiv(end, ps)}"
    leased = r.lease.pages()
    got = rows.pages(slot)[: r.lease.n_pages]
    assert np.array_equal(leased, got), f"row {slot}: leased pages {leased}, its table says {got}"
    assert bool(rows.dead[slot]) == (r.finish is not None), f"row {slot}: dead {rows.dead[slot]}, finish {r.finish}"
    assert rows.last[slot] < s.step, f"row {slot}: last step {rows.last[slot]}, next step {s.step}"
    assert r.emitted <= r.max_new, f"row {slot}: {r.emitted} tokens emitted, {r.max_new} asked for"


def _requests(s: Scheduler) -> None:
    """Each request is in exactly the queue of its state."""
    for uid, r in s.reqs.items():
        where = (uid in s.waiting, uid in s.prefilling, r.slot is not None)
        want = {
            ReqState.WAITING: (True, False, False),
            ReqState.PREFILL: (False, True, True),
            ReqState.DECODE: (False, False, True),
            ReqState.DONE: (False, False, True),
        }[r.state]
        assert where == want, f"request {uid} in state {r.state.name}: (waiting, prefilling, has a row) = {where}"
    strays = {*s.waiting, *s.prefilling} - s.reqs.keys()
    assert not strays, f"queued requests {strays} are not known; known are {sorted(s.reqs)}"
