"""FlashInfer's paged attention: tensor-core decode, in CUDA graphs too, and prefill in one call for all rows.

Decode always takes the wrapper that is made for graphs, whether it is recorded or called: one wrapper for each number of
rows, and one set of buffers for all of them. What it needs from the device's own state, the page lists, is gathered on the
device (``pages.fill_pages``); what its ``plan`` makes from the host's lengths goes to the device in one copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from minisgl.api import PluginError, PluginSettings
from minisgl.api.device import AttentionBackend, AttnContext, AttnFacts, BatchView, GraphSupport, Ring
from minisgl_plugins.attention.limits import load, refusal
from minisgl_plugins.attention.pages import filler

ARCHS = frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
HEAD_DIMS = frozenset({64, 128, 256})
PLAN_BYTES = 8 << 20  # of one plan, as FlashInfer itself allocates
DECODE_PLAN_BYTES = 1 << 20
PINNED, PLANNED = "_pin_memory_int_workspace_buffer", "_int_workspace_buffer"
FAST_PLAN = {"indptr", "indices", "last_page_len", "window_left", "q_data_type", "global_override_indptr_cpu"}


@dataclass(frozen=True, slots=True)
class Meta:
    """``decode``, ``prefill``: planned wrappers, of layers that see everything and of those with a window; empty without rows
    of that phase. ``n``: decode rows. Wrappers keep a plan until their next one: a step's launches come before it."""

    n: int
    decode: list[Any]
    prefill: list[Any]


class Planner:
    """The memory of a wrapper's plans: on the device for one at a time, since the stream runs one step after the other, and
    pinned for several, since a plan is written while the copies of those before it may be under way (M3)."""

    def __init__(self, size: int, device: torch.device, depth: int) -> None:
        self._size = size
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._ring = Ring(device, depth + 1)

    def adopt(self, wrapper: Any) -> Any:
        """Let ``wrapper`` plan here. Returns: it. Raises: PluginError if it is not built as is known."""
        if not (hasattr(wrapper, PINNED) and hasattr(wrapper, PLANNED)):
            raise PluginError(
                "attention 'flashinfer' cannot guard the plans of this flashinfer-python: its wrappers lack "
                f"{PINNED} or {PLANNED}; use 0.6.11.post3, or --attention fa or torch"
            )
        setattr(wrapper, PLANNED, self._device)
        return wrapper

    def plan(self, wrapper: Any, call: Any, *args: Any, **options: Any) -> None:
        """``call`` plans ``wrapper``; its copy is enqueued on the current stream."""
        setattr(wrapper, PINNED, self._ring.take(self._size // 4).view(torch.uint8))
        call(*args, **options)
        self._ring.mark()


class FlashInferAttention(AttentionBackend):
    graph = GraphSupport.DECODE

    class Settings(PluginSettings):
        prefill: Literal["auto", "fa2", "fa3"] = Field(
            "auto", description="kernel of prefill rows; auto: fa3 on compute capability 9.0, else fa2"
        )

    @classmethod
    def supports(cls, f: AttnFacts) -> str | None:
        return refusal(f, "flashinfer", "flashinfer-python", ARCHS, HEAD_DIMS)

    def __init__(self, ctx: AttnContext) -> None:
        self._library = load("flashinfer", "flashinfer", "flashinfer-python")
        self._fast = fast_plan(load("flashinfer", "flashinfer.decode", "flashinfer-python"))
        f, device = ctx.facts, ctx.device
        self._heads, self._kv_heads, self._head_dim = f.heads, f.kv_heads, f.head_dim
        self._page_size, self._dtype, self._device = ctx.kv.page_size, ctx.kv.dtype, device
        self._window_layers = f.window_layers
        self._lefts = [-1] if f.window is None else [-1, f.window - 1]  # what a token sees besides itself
        self._fill = filler(device)
        self._indptr = torch.zeros(ctx.max_slots + 1, dtype=torch.int32, device=device)
        self._last = torch.ones(ctx.max_slots, dtype=torch.int32, device=device)
        self._indices = torch.zeros(ctx.max_slots * ctx.page_table.shape[1], dtype=torch.int32, device=device)
        self._h_indptr, self._h_last = np.zeros(ctx.max_slots + 1, np.int32), np.ones(ctx.max_slots, np.int32)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        size = workspace_bytes(f.heads, f.kv_heads, f.head_dim, ctx.max_slots, sms)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._decode_plans = [Planner(DECODE_PLAN_BYTES, device, ctx.depth) for _ in self._lefts]
        self._prefill_plans = [Planner(PLAN_BYTES, device, ctx.depth) for _ in self._lefts]
        self._decoders: dict[int, list[Any]] = {}  # number of rows -> wrapper of each kind of layer
        self._prefills = [
            planner.adopt(
                self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=ctx.settings.prefill)
            )
            for planner in self._prefill_plans
        ]

    def close(self) -> None:
        self._decoders.clear()
        self._prefills, self._decode_plans, self._prefill_plans = [], [], []
        self._workspace = self._indices = self._indptr = self._last = torch.empty(0)

    # ------------------------------------------------------------------------------------------------------ once a step
    def plan(self, b: BatchView) -> Meta:
        n = b.n_decode
        decode = self._plan_decode(n, b) if n else []
        if n:
            self._gather(n, b)
        return Meta(n, decode, self._plan_prefill(n, b) if n < b.n_rows else [])

    def _plan_decode(self, rows: int, b: BatchView) -> list[Any]:
        """Plan a step of ``rows`` rows: the first rows of ``b`` and, beyond its ``n_decode``, padding of one page each."""
        n = min(b.n_decode, rows)
        indptr, last = self._h_indptr[: rows + 1], self._h_last[:rows]
        kv = b.h_kv[:n]
        pages = -(-kv // self._page_size)
        np.cumsum(pages, out=indptr[1 : n + 1])
        last[:n] = kv - (pages - 1) * self._page_size
        last[n:] = 1
        indptr[n + 1 :] = indptr[n] + np.arange(1, rows - n + 1, dtype=np.int32)
        host = torch.from_numpy(indptr), torch.from_numpy(last)
        wrappers = self._decoders.get(rows)
        if wrappers is None:
            wrappers = self._decoders[rows] = self._make_decoders(rows, *host)
        else:
            for wrapper, left, planner in zip(wrappers, self._lefts, self._decode_plans):
                self._plan_again(planner, wrapper, left, *host)
        return wrappers

    def _make_decoders(self, rows: int, indptr: Tensor, last: Tensor) -> list[Any]:
        """The wrappers for ``rows`` rows, planned for the first time, which also finds their kernel."""
        made = []
        for left, planner in zip(self._lefts, self._decode_plans):
            wrapper = planner.adopt(
                self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=True,  # the other kernel refuses 5, 6 and 7 query heads per KV head (K1)
                    paged_kv_indptr_buffer=self._indptr[: rows + 1],
                    paged_kv_indices_buffer=self._indices,
                    paged_kv_last_page_len_buffer=self._last[:rows],
                    backend="fa2",
                )
            )
            self._plan_whole(planner, wrapper, left, indptr, last)
            made.append(wrapper)
        return made

    def _plan_whole(self, planner: Planner, wrapper: Any, left: int, indptr: Tensor, last: Tensor) -> None:
        shape = self._heads, self._kv_heads, self._head_dim, self._page_size
        pages = self._indices[: int(indptr[-1])]  # in place already, or to be gathered
        planner.plan(
            wrapper, wrapper.plan, indptr, pages, last, *shape,
            window_left=left, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def _plan_again(self, planner: Planner, wrapper: Any, left: int, indptr: Tensor, last: Tensor) -> None:
        """As ``_plan_whole``, a tenth of its host time where FlashInfer has ``fast_decode_plan``: the offsets and lengths that
        ``plan`` copies to the device are made there anyway."""
        if self._fast is None:
            return self._plan_whole(planner, wrapper, left, indptr, last)
        shape = self._heads, self._kv_heads, self._head_dim, self._page_size
        return planner.plan(
            wrapper, self._fast, wrapper, indptr, self._indices, last, *shape,
            window_left=left, q_data_type=self._dtype, kv_data_type=self._dtype, global_override_indptr_cpu=indptr,
        )  # fmt: skip

    def _gather(self, rows: int, b: BatchView) -> None:
        kv, slot = b.kv[:rows], b.slot[:rows]
        self._fill(kv, slot, b.page_table, self._page_size, self._indptr[: rows + 1], self._last[:rows], self._indices)

    def _plan_prefill(self, n: int, b: BatchView) -> list[Any]:
        """Plan rows from ``n`` on."""
        kv, rows = b.h_kv[n:], b.n_rows - n
        pages = -(-kv // self._page_size)
        kv_indptr = np.zeros(rows + 1, np.int32)
        np.cumsum(pages, out=kv_indptr[1:])
        last = kv - (pages - 1) * self._page_size
        indptr, lasts, indices = (
            torch.empty(size, dtype=torch.int32, device=self._device) for size in (rows + 1, rows, int(kv_indptr[-1]))
        )
        self._fill(b.kv[n:], b.slot[n:], b.page_table, self._page_size, indptr, lasts, indices)
        host = [torch.from_numpy(np.ascontiguousarray(a)) for a in (b.h_q_start[n:] - b.h_q_start[n], kv_indptr, last)]
        for wrapper, left, planner in zip(self._prefills, self._lefts, self._prefill_plans):
            planner.plan(
                wrapper, wrapper.plan, host[0], host[1], indices, host[2],
                self._heads, self._kv_heads, self._head_dim, self._page_size,
                causal=True, window_left=left, q_data_type=self._dtype, kv_data_type=self._dtype,
                max_token_per_sequence=int(b.h_q[n:].max()),
            )  # fmt: skip
        return self._prefills

    # ----------------------------------------------------------------------------------------------------- once a layer
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Meta, b: BatchView) -> Tensor:
        kind = int(layer in self._window_layers)
        pool = kv[0], kv[1]
        out: Tensor
        if not meta.prefill:
            out = meta.decode[kind].run(q, pool)
            return out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n = meta.n
        if n:
            meta.decode[kind].run(q[:n], pool, out=out[:n])
        meta.prefill[kind].run(q[n:], pool, out=out[n:])
        return out

    # ---------------------------------------------------------------------------------------------------------- graphs
    def graph_begin(self, rows: Sequence[int]) -> None:
        """Nothing: the buffers are there."""

    def graph_plan(self, b: BatchView) -> Meta:
        return Meta(b.rows_padded, self._plan_decode(b.rows_padded, b), [])

    def graph_prologue(self, meta: Meta, b: BatchView) -> None:
        self._gather(meta.n, b)

    def graph_refresh(self, meta: Meta, b: BatchView) -> None:
        self._plan_decode(b.rows_padded, b)


def fast_plan(module: Any) -> Any:
    """FlashInfer's ``fast_decode_plan`` if it is there and takes what is given here, else None."""
    found = getattr(module, "fast_decode_plan", None)
    return found if found is not None and set(inspect.signature(found).parameters) >= FAST_PLAN else None


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, rows: int, multiprocessors: int) -> int:
    """What FlashInfer's fa2 kernel needs for the partial results of rows whose KV is split: float32 V and a sum for each head
    of each query tile. Tiles are of ``tile`` (token, query head of one KV head) pairs. (flashinfer, scheduler.cuh:
    PrefillSplitQOKVIndptr, PrefillPlan.)

    Args: rows: most decode rows of a step, whose number of tiles is fixed in a graph. Prefill is split only while its tiles
    fill the device no more than once.
    """
    group = heads // kv_heads
    full = 2 * multiprocessors // kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    decode = max(full, -(-rows * group // tile) + rows - 1) * tile
    prefill = full * 128
    return heads * max(decode, prefill) * (head_dim + 1) * 4 + (1 << 20)
