"""A bench for attention backends: a pool with values everywhere, a page table, and a float64 reference that reads both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.base.component import PluginSettings
from minisgl.base.types import I32
from minisgl.runtime.attention import AttentionBackend, AttnContext, AttnFacts, KVSpec
from minisgl.runtime.batch import BatchView
from minisgl.runtime.record import CudaRecorder, EagerRecorder, Graph

Build = Callable[[AttnContext], AttentionBackend]


def build(cls: type[AttentionBackend], **options: Any) -> Build:
    """Makes ``cls`` with these options."""
    return lambda ctx: cls(replace(ctx, settings=cls.Settings(**options)))


def facts_of(
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    window: int | None,
) -> AttnFacts:
    """``window``: of layer 1; layer 0 sees everything."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    layers = frozenset() if window is None else frozenset({1})
    name = str(dtype).removeprefix("torch.")
    return AttnFacts(heads, kv_heads, head_dim, name, page_size, device.type, major * 10 + minor, window, layers)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Causal attention of the last ``len(q)`` positions of one row, computed in ``dtype``.

    Args: q: [n, heads, head_dim]. k, v: [kv, kv_heads, head_dim]. window: how many tokens one sees, itself included.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    (n, heads, dim), (kv, kv_heads, _) = q.shape, k.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nkgd,tkd->kgnt", grouped, k) / dim**0.5
    at = torch.arange(kv, device=q.device)
    position = at[kv - n :, None]
    hidden = at > position
    if window is not None:
        hidden |= at <= position - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("kgnt,tkd->nkgd", weights, v).reshape(n, heads, dim)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Of the whole, by the Euclidean norm."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@dataclass(frozen=True, slots=True)
class Step:
    """One step's inputs, and what must come out. ``like``: the same computed in the pool's dtype by plain torch."""

    view: BatchView
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor
    like: Tensor


class AttentionBench:
    """Rows with a history of random KV. What lies behind the pages that a row owns is random too, and whatever the page table
    has beyond a row's length is a page of somebody else: following it must show."""

    def __init__(
        self,
        make: Build,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        page_size: int = 4,
        slots: int = 8,
        pages: int = 96,
        columns: int = 25,
        window: int | None = None,
        depth: int = 2,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.slots, self.pages, self.window = slots, pages, window
        self.max_len = (columns - 1) * page_size  # one spare column, as the worker has
        self._random = torch.Generator("cpu").manual_seed(seed)
        self._free = torch.randperm(pages, generator=self._random).tolist()
        self.table: I32 = torch.randint(pages, (slots + 1, columns), generator=self._random).numpy().astype(np.int32)
        self.table[slots] = pages  # the padding row: the dummy page only
        self.d_table = torch.from_numpy(self.table).to(self.device, copy=True)
        spec = KVSpec(kv_heads, head_dim, dtype, page_size)
        self.kv = self.randn(*AttentionBackend.kv_shape(spec, pages + 1))
        self.length: dict[int, int] = {}
        facts = facts_of(self.device, heads, kv_heads, head_dim, dtype, page_size, window)
        none = PluginSettings()
        self.context = AttnContext(facts, spec, self.device, slots, self.max_len, 8192, self.d_table, none, depth)
        self.backend = make(self.context)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.device, self.dtype)

    def row(self, slot: int, length: int, *, pages: Sequence[int] | None = None, room: int = 40) -> None:
        """A row of ``length`` tokens, with pages of its own for ``room`` more, or with ``pages``."""
        if pages is None:
            n = -(-min(length + room, self.max_len) // self.page_size)
            pages = [self._free.pop() for _ in range(n)]
        self.table[slot, : len(pages)] = pages
        self.d_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=self.device)
        self.length[slot] = length

    def rows(self, lengths: Mapping[int, int] | Sequence[int], room: int = 40) -> None:
        for slot, n in lengths.items() if isinstance(lengths, Mapping) else enumerate(lengths):
            self.row(slot, n, room=room)

    # -------------------------------------------------------------------------------------------------------- a step
    def step(self, decode: Sequence[int] = (), spans: Mapping[int, int] | None = None, layer: int = 0) -> Step:
        """Rows ``decode`` of one new token, then ``spans``: slot -> new tokens. The rows grow by them."""
        spans = dict(spans or {})
        slots = np.array([*decode, *spans], np.int32)
        new = np.array([1] * len(decode) + list(spans.values()), np.int32)
        before = np.array([self.length[s] for s in slots.tolist()], np.int32)
        kv = before + new
        start = np.zeros(len(new) + 1, np.int32)
        np.cumsum(new, out=start[1:])
        pos = np.concatenate([np.arange(a, b) for a, b in zip(before.tolist(), kv.tolist())])
        loc = self._loc(np.repeat(slots, new), pos)
        for slot, n in zip(slots.tolist(), kv.tolist()):
            self.length[slot] = n
        q, k, v = self._new_tokens(loc)
        view = BatchView(
            step=0,
            n_decode=len(decode),
            n_rows=len(slots),
            n_tokens=len(pos),
            max_q=int(new.max()),
            max_kv=int(kv.max()),
            h_slot=slots,
            h_q=new,
            h_kv=kv,
            h_q_start=start,
            slot=self._put(slots),
            kv=self._put(kv),
            pos=self._put(pos),
            loc=self._put(loc),
            page_table=self.d_table,
            rows_padded=len(slots),
        )
        ends = zip(slots.tolist(), kv.tolist(), start[:-1].tolist(), start[1:].tolist())
        both = [self._row(q[a:b], slot, n, layer) for slot, n, a, b in ends]
        return Step(view, q, k, v, torch.cat([x for x, _ in both]), torch.cat([x for _, x in both]))

    def permuted(self, s: Step, order: Sequence[int]) -> Step:
        """The decode step ``s`` with its rows in another order."""
        v, rows = s.view, np.asarray(order)
        at = self._put(rows)
        view = replace(
            v, h_slot=v.h_slot[rows], h_kv=v.h_kv[rows], slot=v.slot[at], kv=v.kv[at], pos=v.pos[at], loc=v.loc[at]
        )
        return Step(view, s.q[at], s.k[at], s.v[at], s.expected[at], s.like[at])

    def run(self, s: Step, layer: int = 0) -> Tensor:
        """What the backend makes of the step, launched call by call."""
        with torch.inference_mode():
            return self.backend.forward(s.q, s.k, s.v, self.kv, layer, self.backend.plan(s.view), s.view)

    def check(self, decode: Sequence[int] = (), spans: Mapping[int, int] | None = None, layer: int = 0) -> Tensor:
        """One step. The error may be twice that of plain torch in the same dtype. Returns: what came out."""
        s = self.step(decode, spans, layer)
        out = self.run(s, layer)
        self.compare(s, out)
        return out

    def compare(self, s: Step, out: Tensor) -> None:
        assert out.shape == s.expected.shape, (out.shape, s.expected.shape)
        assert out.dtype == self.dtype
        error, usual = relative_error(out, s.expected), relative_error(s.like, s.expected)
        assert error <= max(2 * usual, 1e-6), f"relative error {error:.2e}; plain torch in {self.dtype}: {usual:.2e}"

    def _loc(self, slot: I32, pos: Any) -> Any:
        page = self.table[slot, pos // self.page_size].astype(np.int64)
        return page * self.page_size + pos % self.page_size

    def _put(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device)

    def _new_tokens(self, loc: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one merged tensor, as the layers give them. The pool has the new K and V already."""
        n, heads = len(loc), self.heads + 2 * self.kv_heads
        merged = self.randn(n, heads * self.head_dim).view(n, heads, self.head_dim)
        q, k, v = torch.split(merged, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        pool = self.kv.view(2, -1, self.kv_heads, self.head_dim)
        at = torch.from_numpy(np.asarray(loc, np.int64)).to(self.device)
        k.copy_(pool[0, at])
        v.copy_(pool[1, at])
        return q, k, v

    def _row(self, q: Tensor, slot: int, kv: int, layer: int) -> tuple[Tensor, Tensor]:
        at = self._put(self._loc(np.full(kv, slot, np.int32), np.arange(kv)))
        k, v = self.kv.view(2, -1, self.kv_heads, self.head_dim)[:, at]
        window = self.window if layer else None
        return attend(q, k, v, window), attend(q, k, v, window, self.dtype)


class GraphBench:
    """The backend's decode graphs of some sizes, on a device without graphs called again instead."""

    def __init__(self, bench: AttentionBench, sizes: Sequence[int], layer: int = 0) -> None:
        self.bench, self.layer, self.sizes = bench, layer, sorted(sizes)
        most, device = self.sizes[-1], bench.device
        self._slot = torch.full((most,), bench.slots, device=device)
        self._kv = torch.ones(most, dtype=torch.int64, device=device)
        self._pos = torch.zeros(most, dtype=torch.int64, device=device)
        self._loc = torch.full((most,), bench.pages * bench.page_size, device=device)
        heads = bench.heads + 2 * bench.kv_heads
        self._merged = bench.randn(most, heads, bench.head_dim)
        self._out = torch.zeros(most, bench.heads, bench.head_dim, dtype=bench.dtype, device=device)
        self._graphs: dict[int, tuple[BatchView, Any, Graph]] = {}
        recorder = CudaRecorder(device) if device.type == "cuda" else EagerRecorder()
        with torch.inference_mode():
            bench.backend.graph_begin(self.sizes)
            for n in reversed(self.sizes):
                view = self._view(n)
                meta = bench.backend.graph_plan(view)
                call = self._call(view, meta)
                call()
                self._graphs[n] = view, meta, recorder.record(call)

    def _call(self, view: BatchView, meta: Any) -> Callable[[], None]:
        b, n = self.bench, view.rows_padded

        def call() -> None:
            b.backend.graph_prologue(meta, view)
            q, k, v = torch.split(self._merged[:n], [b.heads, b.kv_heads, b.kv_heads], dim=1)
            self._out[:n].copy_(b.backend.forward(q, k, v, b.kv, self.layer, meta, view))

        return call

    def _view(self, n: int) -> BatchView:
        ones = np.ones(n, np.int32)
        return BatchView(
            step=-1, n_decode=n, n_rows=n, n_tokens=n, max_q=1, max_kv=self.bench.max_len,
            h_slot=np.full(n, self.bench.slots, np.int32), h_q=ones, h_kv=ones, h_q_start=np.arange(n + 1, dtype=np.int32),
            slot=self._slot[:n], kv=self._kv[:n], pos=self._pos[:n], loc=self._loc[:n],
            page_table=self.bench.d_table, rows_padded=n,
        )  # fmt: skip

    def run(self, s: Step, size: int | None = None) -> Tensor:
        """Replay the smallest graph that holds the decode step ``s``, or that of ``size``. Returns: [n, heads, head_dim]."""
        n = s.view.n_rows
        assert s.view.n_decode == n, "graphs are of decode rows"
        size = next(x for x in self.sizes if x >= n) if size is None else size
        view, meta, graph = self._graphs[size]
        with torch.inference_mode():
            view.step, view.n_decode, view.n_rows, view.n_tokens = s.view.step, n, n, n
            view.h_slot, view.h_kv, view.h_q = s.view.h_slot, s.view.h_kv, s.view.h_q
            view.h_q_start, view.max_kv = s.view.h_q_start, s.view.max_kv
            self.bench.backend.graph_refresh(meta, view)
            self._fill(s, n, size)
            graph.replay()
            return self._out[:n].clone()

    def _fill(self, s: Step, n: int, size: int) -> None:
        """What the worker's graph does first: the real rows, then padding."""
        b = self.bench
        for mine, theirs, padding in (
            (self._slot, s.view.slot, b.slots),
            (self._kv, s.view.kv, 1),
            (self._pos, s.view.pos, 0),
            (self._loc, s.view.loc, b.pages * b.page_size),
        ):
            mine[:n].copy_(theirs)
            mine[n:size].fill_(padding)
        for i, x in enumerate((s.q, s.k, s.v)):
            start = (0, b.heads, b.heads + b.kv_heads)[i]
            self._merged[:n, start : start + x.shape[1]].copy_(x)
