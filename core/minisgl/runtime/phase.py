"""Two attention backends as one: the first for prefill rows, the second for decode rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minisgl.base.errors import ConfigError
from minisgl.runtime.attention import AttentionBackend, AttnFacts, GraphSupport, KVSpec
from minisgl.runtime.batch import BatchView


@dataclass(frozen=True, slots=True)
class Part:
    """What one of the two does in a step: its rows as a step of their own, and its metadata of it."""

    view: BatchView
    meta: Any


@dataclass(frozen=True, slots=True)
class Phases:
    """A step that was cut. ``decode``, ``prefill``: None without rows of that phase."""

    decode: Part | None
    prefill: Part | None


class PhaseSplit(AttentionBackend):
    """``prefill`` and ``decode`` share the KV pool, so they must agree on its shape and on who writes to it. A mixed step is cut
    after its decode rows; graphs, being of decode rows, are ``decode``'s alone."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def graph(self) -> GraphSupport:  # type: ignore[override]
        return self.decode.graph

    @property
    def writes_kv(self) -> bool:  # type: ignore[override]
        return self.decode.writes_kv

    def plan(self, b: BatchView) -> Phases:
        n = b.n_decode
        decode = cut(b, 0, n) if n else None
        prefill = cut(b, n, b.n_rows) if n < b.n_rows else None
        return Phases(
            None if decode is None else Part(decode, self.decode.plan(decode)),
            None if prefill is None else Part(prefill, self.prefill.plan(prefill)),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Phases, b: BatchView) -> Tensor:
        d, p = meta.decode, meta.prefill
        if p is None:
            assert d is not None, "a step without rows"
            return self.decode.forward(q, k, v, kv, layer, d.meta, d.view)
        if d is None:
            return self.prefill.forward(q, k, v, kv, layer, p.meta, p.view)
        n = d.view.n_tokens
        first = self.decode.forward(q[:n], k[:n], v[:n], kv, layer, d.meta, d.view)
        return torch.cat((first, self.prefill.forward(q[n:], k[n:], v[n:], kv, layer, p.meta, p.view)))

    def graph_begin(self, rows: Sequence[int]) -> None:
        self.decode.graph_begin(rows)

    def graph_plan(self, b: BatchView) -> Phases:
        return Phases(Part(b, self.decode.graph_plan(b)), None)

    def graph_prologue(self, meta: Phases, b: BatchView) -> None:
        assert meta.decode is not None, "graphs are of decode rows"
        self.decode.graph_prologue(meta.decode.meta, b)

    def graph_refresh(self, meta: Phases, b: BatchView) -> None:
        assert meta.decode is not None, "graphs are of decode rows"
        self.decode.graph_refresh(meta.decode.meta, b)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def cut(b: BatchView, start: int, end: int) -> BatchView:
    """Rows [start, end) as a step of their own; the arrays are views of ``b``'s where nothing changes."""
    if (start, end) == (0, b.n_rows):
        return b
    first, last = int(b.h_q_start[start]), int(b.h_q_start[end])
    rows, tokens = slice(start, end), slice(first, last)
    return replace(
        b,
        n_decode=max(0, min(b.n_decode, end) - start),
        n_rows=end - start,
        n_tokens=last - first,
        max_q=int(b.h_q[rows].max()),
        max_kv=int(b.h_kv[rows].max()),
        h_slot=b.h_slot[rows],
        h_q=b.h_q[rows],
        h_kv=b.h_kv[rows],
        h_q_start=b.h_q_start[start : end + 1] - first,
        slot=b.slot[rows],
        kv=b.kv[rows],
        pos=b.pos[tokens],
        loc=b.loc[tokens],
        rows_padded=end - start,
    )


def check_pair(
    names: Sequence[str], prefill: type[AttentionBackend], decode: type[AttentionBackend], f: AttnFacts
) -> None:
    """Raises: ConfigError if the two cannot share a KV pool."""
    spec = KVSpec(f.kv_heads, f.head_dim, getattr(torch, f.dtype), f.page_size)
    shapes = [c.kv_shape(spec, 2) for c in (prefill, decode)]
    if shapes[0] == shapes[1] and prefill.writes_kv == decode.writes_kv:
        return
    what = (
        f"their KV pools differ: {shapes[0]} and {shapes[1]} for two pages"
        if shapes[0] != shapes[1]
        else f"writes_kv is {prefill.writes_kv} and {decode.writes_kv}"
    )
    raise ConfigError(
        f"attention={','.join(names)!r} cannot be combined: {what}; use one of them for both phases, or two that share a pool"
    )
