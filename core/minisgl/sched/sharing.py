"""Who waits for whose prefill: prompts with a common prefix are computed once."""

from __future__ import annotations

from minisgl.sched.request import Req
from minisgl.sched.residency import Residency


class PromptSharing:
    """Finds waiting requests that share a page, not cached yet, with a prompt that is being prefilled.

    A prompt in prefill is known by its prefix up to its first page that was not cached when it began. That is enough:
    what comes before is pinned, so whoever shares a page beyond it matches at least as much.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._page_size = residency.page_size
        self._first: dict[tuple[bytes, bytes], Req] = {}
        self._generation = 0  # grows whenever a prompt begins

    def begin(self, r: Req) -> None:
        """The prefill of ``r`` begins; its lease covers what is cached."""
        page = r.lease.n_pages
        if len(r.ids) // self._page_size <= page:
            return
        key = self._key(r, page)
        if key not in self._first:
            self._first[key] = r
            r.share_key = key
            self._generation += 1

    def end(self, r: Req) -> None:
        """Its last chunk is planned and its pages are in the cache, or it will not come to that."""
        if r.share_key is not None:
            del self._first[r.share_key]
            r.share_key = None

    def blocked(self, r: Req) -> bool:
        """Whether waiting ``r`` should wait for another's prefill. O(1) while that goes on and when nothing changed."""
        if r.awaits is not None:
            if r.awaits.share_key is not None:
                return True
            r.awaits = None
        if not self._first or not self._residency.keeps or r.checked == self._generation or r.scores:
            return False
        r.checked = self._generation
        page = self._residency.matched(r)
        if (len(r.ids) - 1) // self._page_size <= page:
            return False  # nothing more could be matched
        r.awaits = self._first.get(self._key(r, page))
        return r.awaits is not None

    def _key(self, r: Req, page: int) -> tuple[bytes, bytes]:
        return r.namespace, r.ids[: (page + 1) * self._page_size].tobytes()
