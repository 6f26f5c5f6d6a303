"""An attention backend in plain torch whose decode steps can be captured: for tests of graphs, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.runtime.attention import AttentionBackend, AttnContext, GraphSupport
from minisgl.runtime.batch import BatchView
from minisgl.testing.attention import attend


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode rows. ``pages`` [n, columns] int64, ``lengths`` [n] int64; ``planned`` [n] int64: the lengths as the host knows
    them."""

    pages: Tensor
    lengths: Tensor
    planned: Tensor


class StaticAttention(AttentionBackend):
    """Decode rows attend to all columns of the page table, behind a mask: no shape depends on a length.

    Like FlashInfer it also needs the lengths from the host, through ``graph_refresh``, and like FlashAttention the pages from
    the device, in ``graph_prologue``: a token is attended to only if both sides know of it. Padding rows must have one token on
    the dummy page, which is the last one of the pool.
    """

    graph = GraphSupport.DECODE

    def __init__(self, ctx: AttnContext) -> None:
        self._page_size, self._slots, self._device = ctx.kv.page_size, ctx.max_slots, ctx.device
        self._window, self._window_layers = ctx.facts.window, ctx.facts.window_layers
        self._columns = ctx.page_table.shape[1]
        self.refreshed = 0

    def plan(self, b: BatchView) -> Rows | None:
        n = b.n_decode
        if not n:
            return None
        planned = torch.from_numpy(b.h_kv[:n]).to(self._device, torch.int64)
        return Rows(b.page_table.index_select(0, b.slot[:n]).long(), b.kv[:n], planned)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Rows | None, b: BatchView
    ) -> Tensor:
        window = self._window if layer in self._window_layers else None
        n = 0 if meta is None else meta.lengths.shape[0]
        outs = [] if meta is None else [self._decode(q[:n], kv, meta, window)]
        for row in range(n, b.n_rows):
            at = slice(int(b.h_q_start[row]), int(b.h_q_start[row + 1]))
            outs.append(attend(q[at], *self._row(kv, b, row), window, torch.float32).to(q.dtype))
        return torch.cat(outs)

    def _row(self, kv: Tensor, b: BatchView, row: int) -> tuple[Tensor, Tensor]:
        length = int(b.h_kv[row])
        pages = b.page_table.index_select(0, b.slot[row : row + 1])[0, : -(-length // self._page_size)].long()
        keys, values = kv.index_select(1, pages).flatten(1, 2)[:, :length]
        return keys, values

    def _decode(self, q: Tensor, kv: Tensor, rows: Rows, window: int | None) -> Tensor:
        (n, heads, dim), kv_heads = q.shape, kv.shape[3]
        found = kv.index_select(1, rows.pages.reshape(-1)).view(2, n, -1, kv_heads, dim).float()
        at = torch.arange(found.shape[2], device=q.device)
        hidden = (at >= rows.lengths[:, None]) | (at >= rows.planned[:, None])
        if window is not None:
            hidden |= at < rows.lengths[:, None] - window
        grouped = q.reshape(n, kv_heads, heads // kv_heads, dim).float()
        scores = torch.einsum("nkgd,ntkd->nkgt", grouped, found[0]) / dim**0.5
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("nkgt,ntkd->nkgd", weights, found[1]).reshape(n, heads, dim).to(q.dtype)

    # ---------------------------------------------------------------------------------------------------------- graphs
    def graph_begin(self, rows: Sequence[int]) -> None:
        most = max(rows)
        self._pages = torch.zeros(most, self._columns, dtype=torch.int64, device=self._device)
        self._planned = torch.zeros(most, dtype=torch.int64, device=self._device)

    def graph_plan(self, b: BatchView) -> Rows:
        n = b.rows_padded
        rows = Rows(self._pages[:n], b.kv, self._planned[:n])
        self.graph_refresh(rows, b)
        return rows

    def graph_prologue(self, meta: Rows, b: BatchView) -> None:
        meta.pages.copy_(b.page_table.index_select(0, b.slot))

    def graph_refresh(self, meta: Rows, b: BatchView) -> None:
        meta.planned.fill_(1)
        meta.planned[: b.n_rows].copy_(torch.from_numpy(b.h_kv))
        self.refreshed += 1
