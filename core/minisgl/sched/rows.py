"""The rows of the device as the scheduler knows them, and what is to be told to the device next."""

from __future__ import annotations

import numpy as np

from minisgl.base.types import I32, I64, Bools, Limits, RowInit, SamplingSpec, Span, StepPlan

EMPTY: I32 = np.empty(0, np.int32)
EMPTY.flags.writeable = False


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Rows:
    """Arrays indexed by slot, the decode order, and the deltas for the next plan.

    A row's tokens: |-- prompt --|-- emitted --|-- still to come --|; ``kv`` of them have their KV planned, ``known`` were
    known when the row was opened, and its KV never exceeds ``end`` = prompt + max_new - 1 tokens: the KV of the last output
    token is not needed. A row decodes until ``kv == end``, so a length end is known before its last token is.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        n = limits.max_slots
        self.kv: I32 = np.zeros(n, np.int32)  # tokens whose KV is planned
        self.known: I32 = np.zeros(n, np.int32)
        self.end: I32 = np.zeros(n, np.int32)
        self.n_pages: I32 = np.zeros(n, np.int32)
        self.prompt: I32 = np.zeros(n, np.int32)
        self.emitted: I32 = np.zeros(n, np.int32)  # committed output tokens
        self.max_new: I32 = np.zeros(n, np.int32)
        self.uid: I64 = np.zeros(n, np.int64)
        self.owner: I32 = np.zeros(n, np.int32)
        self.last: I64 = np.full(n, -1, np.int64)  # last step that mentions the row
        self.dead: Bools = np.ones(n, np.bool_)  # free, or ended: its results do not count
        self.table: I32 = np.zeros((n, cdiv(limits.max_len, limits.page_size)), np.int32)  # page ids
        self.tokens: I32 = np.zeros((n, limits.max_len), np.int32)  # history; committed tokens only
        self.free_slots: list[int] = list(range(n - 1, -1, -1))
        self._order: I32 = np.zeros(n, np.int32)  # decode position -> slot
        self._pos: I32 = np.full(n, -1, np.int32)  # slot -> decode position, -1: does not decode
        self.n_decode = 0
        self._retire: list[int] = []
        self._init: list[RowInit] = []
        self._grow: list[tuple[I32, I32, I32]] = []  # slots, positions in the table, pages
        self._moves: dict[int, int] = {}  # decode position -> slot

    @property
    def decoding(self) -> I32:
        """Slots that decode, in order; a view."""
        return self._order[: self.n_decode]

    def decodes(self, slot: int) -> bool:
        return int(self._pos[slot]) >= 0

    # ---------------------------------------------------------------------------------------------- life of a row

    def open(self, uid: int, owner: int, ids: I32, prompt_len: int, max_new: int) -> int:
        """Take a slot for a row with known tokens ``ids``, of which all after the prompt were emitted before."""
        slot = self.free_slots.pop()
        n = len(ids)
        self.uid[slot], self.owner[slot] = uid, owner
        self.prompt[slot], self.known[slot], self.emitted[slot] = prompt_len, n, n - prompt_len
        self.max_new[slot], self.end[slot] = max_new, prompt_len + max_new - 1
        self.tokens[slot, :n] = ids
        self.dead[slot] = False
        return slot

    def announce(self, slot: int, ids: I32, sampling: SamplingSpec) -> None:
        """Put the row, with the pages it has now, into the next plan. ``ids``: known tokens from ``kv`` on."""
        prompt, emitted = int(self.prompt[slot]), int(self.emitted[slot])
        self._init.append(
            RowInit(
                slot=slot,
                uid=int(self.uid[slot]),
                kv_len=int(self.kv[slot]),
                ids=ids,
                pages=self.pages(slot).copy(),
                sampling=sampling,
                emitted=emitted,
                max_new=int(self.max_new[slot]),
                written=self.tokens[slot, prompt : prompt + emitted].copy() if emitted else EMPTY,
                prompt=self.tokens[slot, :prompt].copy() if sampling.needs_prompt else EMPTY,
            )
        )

    def end_row(self, slot: int) -> None:
        """The row has ended: it leaves the decode order and its results no longer count."""
        self.leave(slot)
        self.dead[slot] = True

    def close(self, slot: int) -> None:
        """Free the slot and forget what was to be told about it."""
        self.end_row(slot)
        self.kv[slot] = self.n_pages[slot] = 0
        if self._grow:
            kept = ((g, g[0] != slot) for g in self._grow)
            self._grow = [(s[k], at[k], p[k]) for (s, at, p), k in kept if k.any()]
        assert all(i.slot != slot for i in self._init), f"slot {slot} closed in the pass that opened it"
        self._retire.append(slot)
        self.free_slots.append(slot)

    # -------------------------------------------------------------------------------------------------------- pages

    def pages(self, slot: int) -> I32:
        """The row's pages in order; a view."""
        pages: I32 = self.table[slot, : self.n_pages[slot]]
        return pages

    def add_pages(self, slot: int, pages: I32) -> I32:
        """Append pages to the row without telling the device. Returns: their positions in the row's table."""
        have = int(self.n_pages[slot])
        at = np.arange(have, have + len(pages), dtype=np.int32)
        self.table[slot, at] = pages
        self.n_pages[slot] += len(pages)
        return at

    def tell_pages(self, slot: int, at: I32, pages: I32) -> None:
        """Put page-table writes of one row into the next plan."""
        if len(at):
            self._grow.append((np.full(len(at), slot, np.int32), at, pages))

    def repoint(self, slot: int, at: I32, pages: I32) -> None:
        """Let the row read other pages, with the same content, from the next plan on."""
        self.table[slot, at] = pages
        self.tell_pages(slot, at, pages)

    def starving(self) -> I32:
        """Decoding slots whose next token has no page yet."""
        o = self.decoding
        short: I32 = o[self.kv[o] >= self.n_pages[o] * self.limits.page_size]
        return short

    def wanted_pages(self, slots: I32) -> I32:
        """Pages to give each of these starving slots: ``grow_pages``, at most what the row can still use."""
        most: I32 = -(-self.end[slots] // self.limits.page_size) - self.n_pages[slots]
        return most.clip(max=self.limits.grow_pages)

    def grow(self, slots: I32, counts: I32, pages: I32) -> None:
        """Append ``counts[i]`` of ``pages`` to the row ``slots[i]``, for all i at once."""
        first = np.cumsum(counts) - counts
        within = np.arange(len(pages), dtype=np.int32) - np.repeat(first, counts)
        who = np.repeat(slots, counts)
        at = (self.n_pages[who] + within).astype(np.int32)
        self.table[who, at] = pages
        self.n_pages[slots] += counts
        self._grow.append((who, at, pages))

    def owed_pages(self, share: float) -> int:
        """Pages that live rows still need: for all their known tokens, and for ``share`` of their outstanding output."""
        sure = np.maximum(self.kv, self.known)
        need = sure + np.ceil((self.end - sure) * share).astype(np.int32)
        pages = -(-need // self.limits.page_size) - self.n_pages
        return int(pages[~self.dead & (pages > 0)].sum())

    def owed_tokens(self) -> int:
        """Tokens that live rows may still put into the KV cache."""
        return int((self.end - self.kv)[~self.dead].sum())

    # ------------------------------------------------------------------------------------------------- decode order

    def join(self, slot: int) -> None:
        self._place(self.n_decode, slot)
        self.n_decode += 1

    def leave(self, slot: int) -> None:
        """Leave the decode order; the last row takes its position. No effect on a row that does not decode."""
        pos = int(self._pos[slot])
        if pos < 0:
            return
        last = self.n_decode - 1
        self._place(pos, int(self._order[last]))
        self._moves.pop(last, None)
        self._pos[slot] = -1
        self.n_decode = last

    def _place(self, pos: int, slot: int) -> None:
        self._order[pos] = slot
        self._pos[slot] = pos
        self._moves[pos] = slot

    # --------------------------------------------------------------------------------------------------------- plan

    def emit(self, step: int, n_decode: int, spans: list[Span]) -> StepPlan:
        """Make the plan of ``step``, with all that the device has not been told."""
        g = self._grow
        plan = StepPlan(
            step=step,
            retire=np.array(self._retire, np.int32) if self._retire else EMPTY,
            init=tuple(self._init),
            grow_slot=np.concatenate([s for s, _, _ in g]) if g else EMPTY,
            grow_at=np.concatenate([at for _, at, _ in g]) if g else EMPTY,
            grow_page=np.concatenate([p for _, _, p in g]) if g else EMPTY,
            order_pos=np.fromiter(self._moves.keys(), np.int32, len(self._moves)) if self._moves else EMPTY,
            order_slot=np.fromiter(self._moves.values(), np.int32, len(self._moves)) if self._moves else EMPTY,
            n_decode=n_decode,
            spans=tuple(spans),
        )
        self._retire, self._init, self._grow, self._moves = [], [], [], {}
        return plan
