"""FlashAttention-3 of the package sgl_kernel, for Hopper. It reads the page table itself and plans on the device, so a replayed
step needs nothing from the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from minisgl.api import PluginSettings
from minisgl.api.device import AttentionBackend, AttnContext, AttnFacts, BatchView, GraphSupport, Ring
from minisgl_plugins.attention.limits import installed, load, refusal

ARCHS = frozenset({90})
HEAD_DIMS = frozenset({64, 96, 128, 192, 256})
SPLIT_ROWS = 1024  # rows times splits: bounds the memory of partial results
SPLIT_TOKENS, PREFILL_SPLITS = 512, 4  # prefill steps of more tokens fill the device without splitting


@dataclass(slots=True)
class Rows:
    """Rows of one call. ``pages`` [n, columns], ``lengths`` [n]: int32. ``splits``: at most so many parts of a row's KV are
    computed apart. ``schedules``: of layers that see everything, and of those with a window; None: each layer makes its own."""

    pages: Tensor
    lengths: Tensor
    splits: int
    schedules: list[Tensor | None] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True, slots=True)
class Spans:
    """Prefill rows. ``starts`` [n + 1] int32: offsets into their tokens."""

    rows: Rows
    starts: Tensor
    max_q: int


@dataclass(frozen=True, slots=True)
class Meta:
    n: int  # decode rows
    decode: Rows | None
    prefill: Spans | None


class FlashAttention(AttentionBackend):
    graph = GraphSupport.DECODE

    class Settings(PluginSettings):
        splits: int = Field(
            16,
            ge=1,
            le=128,
            description="most parts into which a decode row's KV is split; fewer with more than 64 rows",
        )

    @classmethod
    def supports(cls, f: AttnFacts) -> str | None:
        reason = refusal(f, "sgl_kernel", "sglang-kernel", ARCHS, HEAD_DIMS)
        if reason is None and not installed("sgl_kernel", "flash_ops"):
            return "sglang-kernel is installed without FlashAttention-3 (flash_ops): pip install 'minisgl[cuda]'"
        return reason

    def __init__(self, ctx: AttnContext) -> None:
        library = load("fa", "sgl_kernel.flash_attn", "sglang-kernel")
        self._attend, self._schedule = library.flash_attn_with_kvcache, library.get_scheduler_metadata
        f = ctx.facts
        self._heads, self._kv_heads, self._head_dim = f.heads, f.kv_heads, f.head_dim
        self._page_size, self._dtype, self._device = ctx.kv.page_size, ctx.kv.dtype, ctx.device
        self._pack = True if f.heads > f.kv_heads else None
        self._window_layers = f.window_layers
        self._windows = [(-1, -1)] if f.window is None else [(-1, -1), (f.window - 1, 0)]
        self._splits: int = ctx.settings.splits
        self._columns = ctx.page_table.shape[1]  # one more than any row fills (N5)
        self._ring = Ring(ctx.device, ctx.depth + 1)
        self._pages = self._lengths = torch.empty(0, dtype=torch.int32, device=ctx.device)

    def close(self) -> None:
        self._pages = self._lengths = torch.empty(0, dtype=torch.int32)

    # ------------------------------------------------------------------------------------------------------ once a step
    def plan(self, b: BatchView) -> Meta:
        n = b.n_decode
        decode = prefill = None
        if n:
            decode = self._rows(b, 0, n, self._decode_splits(n))
            self._make_schedules(decode)
        if n < b.n_rows:
            splits = 1 if b.n_tokens - n > SPLIT_TOKENS else PREFILL_SPLITS
            rows = self._rows(b, n, b.n_rows, splits)
            prefill = Spans(rows, self._starts(b, n), int(b.h_q[n:].max()))
        return Meta(n, decode, prefill)

    def _rows(self, b: BatchView, start: int, end: int, splits: int) -> Rows:
        columns = -(-int(b.h_kv[start:end].max()) // self._page_size)
        pages = b.page_table.index_select(0, b.slot[start:end])[:, :columns]
        return Rows(pages, b.kv[start:end].int(), splits)

    def _starts(self, b: BatchView, n: int) -> Tensor:
        host = self._ring.take(b.n_rows - n + 1)
        host.numpy()[:] = b.h_q_start[n:] - b.h_q_start[n]
        starts = host.to(self._device, non_blocking=True)
        self._ring.mark()
        return starts

    def _decode_splits(self, rows: int) -> int:
        """The same for all steps of so many rows: it is fixed in their graph."""
        return max(1, min(self._splits, SPLIT_ROWS // rows))

    def _make_schedules(self, rows: Rows) -> None:
        """Once for all layers. Without splits a layer makes its own: resetting a shared one would take as many kernels."""
        if rows.splits == 1:
            return
        for kind, window in enumerate(self._windows):
            rows.schedules[kind] = self._schedule(
                batch_size=rows.lengths.shape[0],
                max_seqlen_q=1,
                max_seqlen_k=rows.pages.shape[1] * self._page_size,
                num_heads=self._heads,
                num_heads_k=self._kv_heads,
                headdim=self._head_dim,
                cache_seqlens=rows.lengths,
                qkv_dtype=self._dtype,
                page_size=self._page_size,
                causal=True,
                window_size=window,
                num_splits=rows.splits,
                pack_gqa=self._pack,
            )

    # ----------------------------------------------------------------------------------------------------- once a layer
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Meta, b: BatchView) -> Tensor:
        kind = int(layer in self._window_layers)
        n = meta.n
        if meta.prefill is None:
            return self._decode(q, kv, kind, meta.decode)
        if meta.decode is None:
            return self._prefill(q, kv, kind, meta.prefill)
        return torch.cat((self._decode(q[:n], kv, kind, meta.decode), self._prefill(q[n:], kv, kind, meta.prefill)))

    def _decode(self, q: Tensor, kv: Tensor, kind: int, rows: Rows | None) -> Tensor:
        assert rows is not None, "a step without rows"
        out = self._call(q.unsqueeze(1), kv, kind, rows, pack_gqa=self._pack, scheduler_metadata=rows.schedules[kind])
        return out.squeeze(1)

    def _prefill(self, q: Tensor, kv: Tensor, kind: int, spans: Spans) -> Tensor:
        return self._call(q, kv, kind, spans.rows, cu_seqlens_q=spans.starts, max_seqlen_q=spans.max_q)

    def _call(self, q: Tensor, kv: Tensor, kind: int, rows: Rows, **more: Any) -> Tensor:
        out: Tensor = self._attend(
            q,
            kv[0],
            kv[1],
            cache_seqlens=rows.lengths,
            page_table=rows.pages,
            causal=True,
            window_size=self._windows[kind],
            num_splits=rows.splits,
            **more,
        )
        return out

    # ---------------------------------------------------------------------------------------------------------- graphs
    def graph_begin(self, rows: Sequence[int]) -> None:
        most = max(rows)
        self._pages = torch.zeros(most, self._columns, dtype=torch.int32, device=self._device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=self._device)

    def graph_plan(self, b: BatchView) -> Meta:
        n = b.rows_padded
        return Meta(n, Rows(self._pages[:n], self._lengths[:n], self._decode_splits(n)), None)

    def graph_prologue(self, meta: Meta, b: BatchView) -> None:
        rows = meta.decode
        assert rows is not None, "graphs are of decode rows"
        torch.index_select(b.page_table, 0, b.slot, out=rows.pages)
        rows.lengths.copy_(b.kv)
        self._make_schedules(rows)
