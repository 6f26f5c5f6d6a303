"""Rows: what the worker knows of each slot, and how a step plan changes it.

The host mirrors what follows from the plans alone: lengths, pages, how many tokens a row has put out. So it is known before
the device is done, and steps can be enqueued ahead. The tokens themselves are known to the device first. The vectors are
indexed by slot; slot ``max_slots`` is the padding row, whose pages are all the dummy page (I11).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import I32, NO_PAGES, Bools, RowInit, StepPlan
from minisgl.runtime.scores import Ask


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of one step. ``slot``, ``q``, ``kv`` [n_rows]: slots, new tokens, KV length after the step; decode rows first.
    ``pos`` [n_tokens]; ``loc`` [n_tokens]: where their KV goes. ``known`` [n_tokens - n_decode]: the tokens that the plan
    gave. ``sample`` [n_sample]: which tokens are sampled after; ``sampled``: their slots."""

    slot: I32
    q: I32
    kv: I32
    q_start: I32
    pos: I32
    loc: I32
    known: I32
    sample: I32
    sampled: I32


class Rows:
    """S = ``max_slots``, P = ``ceil(max_len / page_size) + 1``: one spare column (N5).

    ``page_table`` [S + 1, P] int32; ``kv_len``, ``n_out`` [S + 1] int32; ``stop_ids`` [S + 1, K] int32, padded with -1;
    ``order`` [S] int32.
    """

    def __init__(self, max_slots: int, max_len: int, num_pages: int, page_size: int) -> None:
        self.max_slots, self.page_size, self.dummy_page = max_slots, page_size, num_pages
        self.columns = -(-max_len // page_size) + 1
        rows = max_slots + 1
        self.page_table = np.full((rows, self.columns), self.dummy_page, np.int32)
        self.kv_len = np.zeros(rows, np.int32)
        self.n_out = np.zeros(rows, np.int32)
        self.stop_ids = np.full((rows, 1), -1, np.int32)
        self.order = np.zeros(max_slots, np.int32)
        self._known: list[I32] = [NO_PAGES] * rows  # tokens of the prompt, from position _base on
        self._base = np.zeros(rows, np.int32)
        self._prompt = np.zeros(rows, np.int32)  # tokens of the prompt

    def apply(self, plan: StepPlan) -> tuple[I32, I32]:
        """Apply what the plan changes, in its order. Returns: the cells of the flattened page table that changed, each once,
        and their pages."""
        for slot in plan.retire.tolist():
            self._known[slot] = NO_PAGES
            self.kv_len[slot] = 0
        for row in plan.init:
            self._init(row)
        if len(plan.order_pos):
            self.order[plan.order_pos] = plan.order_slot
        cells = [row.slot * self.columns + np.arange(len(row.pages), dtype=np.int32) for row in plan.init]
        if len(plan.grow_slot):
            self.page_table[plan.grow_slot, plan.grow_at] = plan.grow_page
            cells.append(plan.grow_slot * self.columns + plan.grow_at)
        if not cells:
            return NO_PAGES, NO_PAGES
        changed = np.concatenate(cells).astype(np.int32)
        if len(cells) > 1:
            changed = np.unique(changed)
        return changed, self.page_table.reshape(-1)[changed]

    def _init(self, row: RowInit) -> None:
        s, n = row.slot, len(row.pages)
        self.page_table[s, :n] = row.pages
        self.page_table[s, n:] = self.dummy_page  # nothing stale of the row before
        self.kv_len[s] = self._base[s] = row.kv_len
        self._known[s] = row.ids
        self._prompt[s] = row.kv_len + len(row.ids) - row.emitted
        self.n_out[s] = row.emitted
        stops = row.sampling.stop_ids
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((len(self.stop_ids), len(stops) - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate((self.stop_ids, more), axis=1)
        self.stop_ids[s, : len(stops)] = stops
        self.stop_ids[s, len(stops) :] = -1

    def known(self, slot: int, start: int, n: int) -> I32:
        """The row's tokens at positions [start, start + n), which the plan gave."""
        at = start - int(self._base[slot])
        ids = self._known[slot][at : at + n]
        assert len(ids) == n, f"slot {slot}: tokens [{start}, {start + n}) are planned, known up to {at + len(ids)}"
        return ids

    def asks(self, plan: StepPlan) -> Ask | None:
        """The prompt tokens that the spans with ``score`` predict; before the step is laid out. None if there are none: the
        last token of a prompt predicts none."""
        first, at, row, position, token = plan.n_decode, [], [], [], []
        for s in plan.spans:
            start = int(self.kv_len[s.slot])
            n = min(s.n_new, int(self._prompt[s.slot]) - 1 - start) if s.score else 0
            if n > 0:
                at.append(np.arange(first, first + n, dtype=np.int32))
                row.append(np.full(n, s.slot, np.int32))
                position.append(np.arange(start + 1, start + 1 + n, dtype=np.int32))
                token.append(self.known(s.slot, start + 1, n))
            first += s.n_new
        return Ask(*(np.concatenate(x) for x in (at, row, position, token))) if at else None

    def locate(self, slot: I32, pos: I32) -> I32:
        """Where in the pool the KV of each token goes: ``page * page_size + offset``."""
        page, offset = np.divmod(pos, self.page_size)
        out: I32 = self.page_table[slot, page] * self.page_size + offset
        return out

    def decoding(self, n: int) -> tuple[I32, I32]:
        """The slots of a step of ``n`` decode rows, and their KV lengths after it, to which they advance."""
        slot = self.order[:n].copy()
        kv = self.kv_len[slot] + 1
        self.kv_len[slot] = kv
        return slot, kv

    def layout(self, plan: StepPlan) -> Layout:
        """Lay out the step's tokens; its rows advance by them. Vector operations for decode rows, a few Python operations for
        each prefill span."""
        n = plan.n_decode
        slot, kv = self.decoding(n)
        q, pos, of_token = np.ones(n, np.int32), kv - 1, slot
        sample, known = np.arange(n, dtype=np.int32), NO_PAGES
        if plan.spans:
            slots = np.array([s.slot for s in plan.spans], np.int32)
            lengths = np.array([s.n_new for s in plan.spans], np.int32)
            starts = self.kv_len[slots]
            at = list(zip(slots.tolist(), starts.tolist(), lengths.tolist()))
            pos = np.concatenate((pos, *(np.arange(a, a + m, dtype=np.int32) for _, a, m in at)))
            known = np.concatenate([self.known(s, a, m) for s, a, m in at])
            of_token = np.concatenate((slot, np.repeat(slots, lengths)))
            last = n + np.cumsum(lengths, dtype=np.int32) - 1
            sample = np.concatenate((sample, last[[s.sample for s in plan.spans]]))
            self.kv_len[slots] += lengths
            slot, q, kv = (np.concatenate(pair) for pair in ((slot, slots), (q, lengths), (kv, self.kv_len[slots])))
        q_start = np.zeros(len(q) + 1, np.int32)
        np.cumsum(q, out=q_start[1:])
        loc = self.locate(of_token, pos)
        return Layout(slot, q, kv, q_start, pos, loc, known, sample, of_token[sample])

    def emit(self, slot: I32) -> tuple[I32, I32]:
        """One token is sampled for each row. Returns: how many each had before, and the rows' stop sets, [n, K]."""
        before = self.n_out[slot]
        self.n_out[slot] = before + 1
        return before, self.stop_ids[slot]


def stopped(tokens: I32, stop_ids: I32) -> Bools:
    """Whether each of ``tokens`` [n] is in its row's stop set."""
    found: Bools = (stop_ids == tokens[:, None]).any(axis=1)
    return found


class DeviceRows:
    """The rows as the device keeps them, so that a captured step needs nothing from the host: ``table`` [S + 1, P] int32;
    ``kv_len``, ``next_token``, ``n_out`` [S + 1] int64; ``order`` [S] and ``n_decode`` [1] int64. On a CPU ``table`` is the
    host's own array."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        host = torch.from_numpy(rows.page_table)
        self.table: Tensor = host.to(device)
        self.shared = self.table.data_ptr() == host.data_ptr()
        size = rows.max_slots + 1
        self.kv_len, self.next_token, self.n_out = (
            torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.order = torch.zeros(rows.max_slots, dtype=torch.int64, device=device)
        self.n_decode = torch.zeros(1, dtype=torch.int64, device=device)
        self.h_n_decode = 0

    def change(self, cells: Tensor, pages: Tensor, order_pos: Tensor, order_slot: Tensor) -> None:
        """Apply a plan's changes to the page table and the decode order, int64 on the device."""
        if len(cells) and not self.shared:
            self.table.view(-1).index_copy_(0, cells, pages.int())
        if len(order_pos):
            self.order.index_copy_(0, order_pos, order_slot)

    def resize(self, n_decode: int) -> None:
        """From now on so many rows decode."""
        if n_decode != self.h_n_decode:
            self.n_decode.fill_(n_decode)
            self.h_n_decode = n_decode

    def sampled(self, slot: Tensor, out: Tensor, tokens: Tensor) -> None:
        """Each row of ``slot`` [n] got its token ``tokens``, after ``out`` others."""
        self.next_token.index_copy_(0, slot, tokens)
        self.n_out.index_copy_(0, slot, out + 1)
