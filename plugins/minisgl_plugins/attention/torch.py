"""Paged attention in plain torch: the reference backend, and the one for CPUs.

Decode rows are one batched call, or a few when their lengths differ much: their pages are gathered into a buffer that is
used again, and a mask hides what lies beyond each row's length. The query heads that share a KV head are laid along the query dimension, so K and V are read once
for the group and never repeated. A prefill span is one call of its own; without a cached prefix it needs no gathering.
Sliding windows are masks: what lies before the window is gathered and hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import AttentionBackend, AttnContext, BatchView

Ints = npt.NDArray[np.int64]

SPLIT_GAIN = 512  # padded KV tokens that a second call must save; about what the call costs


@dataclass(slots=True)
class Pages:
    """Pages of some rows, and how many tokens to use of each. ``run``: [start, end) tokens of the pool if the pages of a
    single row lie one after the other, so that they can be used where they are."""

    index: Tensor  # [rows * columns] int64
    rows: int
    max_kv: int
    run: tuple[int, int] | None


@dataclass(slots=True)
class DecodePart:
    """Rows of one token, of similar length. ``rows`` [n] int64; None: all the first n of the step."""

    n: int
    rows: Tensor | None
    pages: Pages
    mask: Tensor | None  # [n, 1, 1, max_kv] 0 or -inf; None if every row has max_kv tokens


@dataclass(slots=True)
class SpanPart:
    """One prefill span: tokens [start, end) of the step. ``pages`` None: nothing of the row is cached before it. ``mask``
    None: causal."""

    start: int
    end: int
    pages: Pages | None
    mask: Tensor | None  # [end - start, max_kv] 0 or -inf


@dataclass(slots=True)
class Meta:
    decode: list[DecodePart]
    spans: list[SpanPart]


class TorchAttention(AttentionBackend):
    def __init__(self, ctx: AttnContext) -> None:
        self.heads, self.kv_heads, self.head_dim = ctx.facts.heads, ctx.facts.kv_heads, ctx.facts.head_dim
        self.group = self.heads // self.kv_heads
        self.page_size, self.device, self.dtype = ctx.kv.page_size, ctx.device, ctx.kv.dtype
        self.window, self.window_layers = ctx.facts.window, ctx.facts.window_layers
        self._buffers = [torch.empty(0, dtype=self.dtype, device=self.device) for _ in range(2)]  # gathered K, V

    def close(self) -> None:
        self._buffers = []

    # ------------------------------------------------------------------------------------------------------ once a step
    def plan(self, b: BatchView) -> tuple[Meta, Meta]:
        """Of the layers that see everything, and of those with a window; one and the same while no row is longer."""
        whole = self._plan(b, None)
        return whole, self._plan(b, self.window) if self.window is not None and b.max_kv > self.window else whole

    def _plan(self, b: BatchView, window: int | None) -> Meta:
        longer = np.flatnonzero(b.h_q > 1)
        n = int(longer[0]) if len(longer) else b.n_rows  # a prefill span of one token is a decode row
        decode = [self._plan_decode(b, n, rows, window) for rows in similar(b.h_kv[:n])] if n else []
        return Meta(decode, [self._plan_span(b, row, window) for row in range(n, b.n_rows)])

    def _plan_decode(self, b: BatchView, total: int, rows: Ints, window: int | None) -> DecodePart:
        n, lengths = len(rows), b.h_kv[rows]
        chosen = None if n == total else torch.from_numpy(rows).to(self.device)
        slot, kv = (b.slot[:n], b.kv[:n]) if chosen is None else (b.slot[chosen], b.kv[chosen])
        longest = int(lengths.max())
        mask = None
        if int(lengths.min()) < longest or (window is not None and longest > window):
            position = torch.arange(longest, device=self.device)
            hidden = position >= kv[:, None]
            if window is not None:
                hidden |= position < kv[:, None] - window
            mask = self._mask(hidden).view(n, 1, 1, longest)
        return DecodePart(n, chosen, self._pages(b, slot, kv, longest), mask)

    def _plan_span(self, b: BatchView, row: int, window: int | None) -> SpanPart:
        start, end = int(b.h_q_start[row]), int(b.h_q_start[row + 1])
        n, kv = end - start, int(b.h_kv[row])
        if n == kv and (window is None or kv <= window):
            return SpanPart(start, end, None, None)
        position = torch.arange(kv - n, kv, device=self.device)
        hidden = torch.arange(kv, device=self.device) > position[:, None]
        if window is not None:
            hidden |= torch.arange(kv, device=self.device) <= position[:, None] - window
        if n == kv:
            return SpanPart(start, end, None, self._mask(hidden))
        at = slice(row, row + 1)
        return SpanPart(start, end, self._pages(b, b.slot[at], b.kv[at], kv), self._mask(hidden))

    def _mask(self, hidden: Tensor) -> Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(hidden, float("-inf"))

    def _pages(self, b: BatchView, slot: Tensor, kv: Tensor, max_kv: int) -> Pages:
        """The pages of these rows as a rectangle; entries beyond a row's length are replaced, they may be stale."""
        columns = -(-max_kv // self.page_size)
        table = b.page_table.index_select(0, slot)[:, :columns]  # [n, columns]
        n = table.shape[0]
        used = -(-kv // self.page_size)
        table = torch.where(torch.arange(columns, device=self.device) < used[:, None], table, 0)
        run = self._run(table[0].numpy(), max_kv) if n == 1 and self.device.type == "cpu" else None
        return Pages(table.reshape(-1).long(), n, max_kv, run)

    def _run(self, pages: npt.NDArray[np.int32], max_kv: int) -> tuple[int, int] | None:
        first = int(pages[0])
        if int(pages[-1]) - first != len(pages) - 1 or (np.diff(pages) != 1).any():
            return None
        return first * self.page_size, first * self.page_size + max_kv

    # ----------------------------------------------------------------------------------------------------- once a layer
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: tuple[Meta, Meta], b: BatchView
    ) -> Tensor:
        return self._attend(q, k, v, kv, meta[layer in self.window_layers], b)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: Meta, b: BatchView) -> Tensor:
        pool = kv.view(2, -1, self.kv_heads, self.head_dim)
        if not meta.spans and len(meta.decode) == 1:
            return self._decode(q, pool, meta.decode[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for d in meta.decode:
            if d.rows is None:
                out[: d.n] = self._decode(q[: d.n], pool, d)
            else:
                out.index_copy_(0, d.rows, self._decode(q.index_select(0, d.rows), pool, d))
        for s in meta.spans:
            at = slice(s.start, s.end)
            if s.pages is None:
                out[at] = self._prefill(q[at], k[at], v[at], s.mask)
            else:
                keys, values = self._gather(pool, s.pages)
                out[at] = self._prefill(q[at], keys[0], values[0], s.mask)
        return out

    def _gather(self, pool: Tensor, p: Pages) -> tuple[Tensor, Tensor]:
        """Returns: K and V, each [rows, max_kv, kv_heads, head_dim]."""
        if p.run is not None:
            return pool[0, p.run[0] : p.run[1]].unsqueeze(0), pool[1, p.run[0] : p.run[1]].unsqueeze(0)
        size = p.index.shape[0] * self.page_size * self.kv_heads * self.head_dim
        if size > self._buffers[0].shape[0]:
            self._buffers = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2)]
        found = []
        for side, buffer in zip(pool, self._buffers):
            out = buffer[:size].view(p.index.shape[0], -1)
            torch.index_select(side.view(-1, out.shape[1]), 0, p.index, out=out)
            found.append(out.view(p.rows, -1, self.kv_heads, self.head_dim)[:, : p.max_kv])
        return found[0], found[1]

    def _decode(self, q: Tensor, pool: Tensor, d: DecodePart) -> Tensor:
        keys, values = self._gather(pool, d.pages)
        grouped = q.reshape(d.n, self.kv_heads, self.group, self.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=d.mask)
        return out.reshape(d.n, self.heads, self.head_dim)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """One row. q: [n, heads, head_dim]; k, v: [kv, kv_heads, head_dim]; without a mask kv = n, causal."""
        n = q.shape[0]
        grouped = q.reshape(n, self.kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, self.group, -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3).reshape(n, self.heads, self.head_dim)


def similar(lengths: npt.NDArray[np.int32]) -> list[Ints]:
    """Split rows into groups of similar length, so that a batch padded to its longest row computes less.

    Returns: row numbers of each group; one group of all rows in order if no split saves enough.
    """
    n = len(lengths)
    order = np.argsort(lengths, kind="stable")
    rising = lengths[order].astype(np.int64)
    below = np.arange(1, n)
    saved = below * (rising[-1] - rising[:-1])  # padded tokens saved by splitting before each row but the first
    if n < 2 or saved.max() < SPLIT_GAIN:
        return [np.arange(n)]
    at = int(saved.argmax()) + 1
    return [part[rows] for part in (order[:at], order[at:]) for rows in similar(lengths[part])]
