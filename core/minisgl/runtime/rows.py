"""Device rows: what the worker knows of each slot, and how a step plan changes it.

Host arrays hold every row's state; lengths and pages follow from the plans alone, so they are known before the device is
done. Only the page table is mirrored on the device. The vectors are indexed by slot; slot ``max_slots`` is the padding row,
whose pages are all the dummy page (I11).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.base.types import I32, NO_PAGES, RowInit, StepPlan


class Rows:
    """S = ``max_slots``, P = ``ceil(max_len / page_size) + 1``: one spare column (N5).

    ``page_table`` [S + 1, P] int32; ``kv_len``, ``next_token``, ``n_out`` [S + 1] int32; ``stop_ids`` [S + 1, K] int32,
    padded with -1; ``order`` [S] int32. ``table`` is the page table on the device.
    """

    def __init__(self, max_slots: int, max_len: int, num_pages: int, page_size: int, device: torch.device) -> None:
        self.max_slots, self.page_size, self.dummy_page = max_slots, page_size, num_pages
        self.columns = -(-max_len // page_size) + 1
        rows = max_slots + 1
        self.page_table = np.full((rows, self.columns), self.dummy_page, np.int32)
        self.kv_len = np.zeros(rows, np.int32)
        self.next_token = np.zeros(rows, np.int32)
        self.n_out = np.zeros(rows, np.int32)
        self.stop_ids = np.full((rows, 1), -1, np.int32)
        self.order = np.zeros(max_slots, np.int32)
        self._known: list[I32] = [NO_PAGES] * rows  # tokens of the prompt, from position _base on
        self._base = np.zeros(rows, np.int32)
        shared = torch.from_numpy(self.page_table)  # on a CPU the two are one
        self.table: Tensor = shared.to(device)
        self._copy = self.table.data_ptr() != shared.data_ptr()

    def apply(self, plan: StepPlan) -> None:
        """Apply what the plan changes, in its order."""
        for slot in plan.retire.tolist():
            self._known[slot] = NO_PAGES
            self.kv_len[slot] = 0
        for row in plan.init:
            self._init(row)
        if len(plan.grow_slot):
            self.page_table[plan.grow_slot, plan.grow_at] = plan.grow_page
            if self._copy:
                self._write(plan.grow_slot, plan.grow_at, plan.grow_page)
        if len(plan.order_pos):
            self.order[plan.order_pos] = plan.order_slot

    def _init(self, row: RowInit) -> None:
        s, n = row.slot, len(row.pages)
        self.page_table[s, :n] = row.pages
        self.page_table[s, n:] = self.dummy_page  # nothing stale of the row before
        self.kv_len[s] = self._base[s] = row.kv_len
        self._known[s] = row.ids
        self.n_out[s] = row.emitted
        stops = row.sampling.stop_ids
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((len(self.stop_ids), len(stops) - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate((self.stop_ids, more), axis=1)
        self.stop_ids[s, : len(stops)] = stops
        self.stop_ids[s, len(stops) :] = -1
        if self._copy:
            self.table[s].copy_(torch.from_numpy(self.page_table[s]))

    def _write(self, slot: I32, at: I32, page: I32) -> None:
        cells = [torch.from_numpy(a.astype(np.int64)).to(self.table.device) for a in (slot, at)]
        self.table[cells[0], cells[1]] = torch.from_numpy(np.array(page, np.int32)).to(self.table.device)

    def known(self, slot: int, start: int, n: int) -> I32:
        """The row's tokens at positions [start, start + n), which the plan gave."""
        at = start - int(self._base[slot])
        ids = self._known[slot][at : at + n]
        assert len(ids) == n, f"slot {slot}: tokens [{start}, {start + n}) are planned, known up to {at + len(ids)}"
        return ids

    def locate(self, slot: I32, pos: I32) -> I32:
        """Where in the pool the KV of each token goes: ``page * page_size + offset``."""
        page, offset = np.divmod(pos, self.page_size)
        out: I32 = self.page_table[slot, page] * self.page_size + offset
        return out

    def emit(self, slot: I32, tokens: I32) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Note one sampled token per row. Returns: whether it is in the row's stop set."""
        self.next_token[slot] = tokens
        self.n_out[slot] += 1
        stop: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (self.stop_ids[slot] == tokens[:, None]).any(axis=1)
        return stop
