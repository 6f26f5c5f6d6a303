"""The cache policy on its own: how its calls grow with what is cached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from minisgl.base.errors import ConfigError
from minisgl.base.types import I32
from minisgl.sched.cache import CachePolicy

PROMPT = 4096  # tokens
TURN, BRANCH = 256, 64  # at the end of each turn of a prompt another text of BRANCH tokens went on
INSERTED = 512  # tokens of the prompts whose insertion is measured
P = ParamSpec("P")
T = TypeVar("T")


class Filled:
    """A cache with about ``tokens`` tokens. Its prompts are cut into nodes of a turn, as conversations are; the second of
    each two shares the first half of the first."""

    def __init__(self, cache: CachePolicy, page_size: int, tokens: int) -> None:
        self.cache, self.page_size = cache, page_size
        self.rng = np.random.default_rng(0)
        self.prompts: list[I32] = []
        free = np.arange(tokens // page_size, dtype=np.int32)
        while len(free) * page_size >= PROMPT + PROMPT // TURN * BRANCH:
            ids = self.fresh(PROMPT)
            if len(self.prompts) % 2:
                ids[: PROMPT // 2] = self.prompts[-1][: PROMPT // 2]
            self.prompts.append(ids)
            branches = [np.concatenate([ids[:at], self.fresh(BRANCH)]) for at in range(TURN, PROMPT, TURN)]
            for text in (*branches, ids):
                free = free[self.add(text, free) :]

    def fresh(self, n: int) -> I32:
        return self.rng.integers(0, 1 << 17, n).astype(np.int32)

    def add(self, ids: I32, free: I32) -> int:
        """Insert a prompt with pages of ``free``. Returns: how many of them the cache took."""
        lease = self.cache.lease(ids, b"")
        new = len(ids) // self.page_size - lease.n_pages
        pages = np.concatenate([lease.pages(), free[:new]])
        self.cache.release(self.cache.insert(ids, pages, lease, b"").lease)
        return new


def cache_calls(cache: CachePolicy, page_size: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians of ``repeats`` calls each: match of PROMPT tokens, insert of INSERTED, and eviction, of one page (``evict_1``) and
    a page of many (``evict``).

    Raises: ConfigError if the cache gives nothing back.
    """
    filled = Filled(cache, page_size, tokens)
    if not cache.stats().evictable:
        raise ConfigError("bench host needs a cache that keeps prefixes: choose another one, such as --cache radix")
    known = filled.prompts[-16:]
    match, insert, evict, one = [], [], [], []
    for i in range(repeats):
        us, n_pages = timed(cache.match, known[i % len(known)], b"")
        assert n_pages == PROMPT // page_size
        match.append(us)
    for _ in range(repeats):
        us, pages = timed(cache.evict, INSERTED // page_size)
        evict.append(us / len(pages))
        insert.append(timed(filled.add, filled.fresh(INSERTED), pages)[0])
    for _ in range(repeats):
        one.append(timed(cache.evict, 1)[0])
    calls = {"match_us": match, "insert_us": insert, "evict_1_us": one, "evict_us": evict}
    times = {name: float(np.median(us)) for name, us in calls.items()}
    rates = {f"{n}_per_s": round(1e6 / times[f"{n}_us"]) for n in ("match", "insert", "evict")}
    return {"page": page_size, "cached": tokens, **times, **rates}


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    """us, and what it returned."""
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return (time.perf_counter() - start) * 1e6, result
