"""Paged attention row by row, in float32: slow and easy to follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.api.device import AttentionBackend, AttnContext, AttnFacts, BatchView


class AcmeAttention(AttentionBackend):
    """For CPUs."""

    def __init__(self, ctx: AttnContext) -> None:
        self.page_size = ctx.kv.page_size
        self.group = ctx.facts.heads // ctx.facts.kv_heads

    @classmethod
    def supports(cls, f: AttnFacts) -> str | None:
        if f.device != "cpu":
            return f"runs on cpu, not on {f.device}"
        return "sliding windows are not supported" if f.window is not None else None

    def plan(self, b: BatchView) -> Any:
        """For each row: its new tokens [start, end), its KV length, and the pages that hold it."""
        rows = []
        for i in range(b.n_rows):
            kv = int(b.h_kv[i])
            pages = b.page_table[int(b.h_slot[i]), : -(-kv // self.page_size)].long()  # [ceil(kv / page_size)]
            rows.append((int(b.h_q_start[i]), int(b.h_q_start[i + 1]), kv, pages))
        return rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Any, b: BatchView) -> Tensor:
        out = torch.empty_like(q)
        for start, end, n_kv, pages in meta:
            keys, values = (
                x[pages].flatten(0, 1)[:n_kv].float().repeat_interleave(self.group, dim=1) for x in (kv[0], kv[1])
            )  # [n_kv, heads, head_dim]
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * q.shape[-1] ** -0.5
            position = torch.arange(n_kv - (end - start), n_kv)  # of the new tokens in their row
            hidden = torch.arange(n_kv) > position[:, None]  # [n_new, n_kv]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out
