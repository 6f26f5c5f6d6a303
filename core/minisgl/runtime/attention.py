"""The attention backend: reads and writes the paged KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from minisgl.base.component import Component
from minisgl.runtime.batch import BatchView


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One layer's KV: ``kv_heads`` x ``head_dim`` elements of ``dtype`` for K and as many for V, per token."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, K and V."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttnFacts:
    """Plain values by which a backend says whether it fits. ``sm``: CUDA compute capability x 10, 0 on a CPU. ``window``: how
    many tokens a token sees in the ``window_layers``, itself included; None if all layers see everything."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    device: str
    sm: int = 0
    window: int | None = None
    window_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class AttnContext:
    facts: AttnFacts
    kv: KVSpec
    device: torch.device
    max_slots: int
    max_len: int
    max_tokens: int  # of a step
    page_table: Tensor  # [max_slots + 1, pages_per_row] int32, on the device
    settings: Any
    depth: int = 1  # steps in flight at once


class GraphSupport(IntEnum):
    """Which steps of a backend can be captured in a CUDA graph."""

    NONE = 0
    DECODE = 1


class AttentionBackend(Component):
    """Rows of a step may decode (one token) or prefill (several), mixed; a row attends to its KV causally.

    ``writes_kv``: True if ``forward`` stores the new K and V itself; else the op ``store_kv`` has done it before, and
    ``kv_shape`` must be the one below.

    A backend with ``graph = DECODE`` serves steps of decode rows from a captured graph too. It owns every buffer behind the
    ``graph_*`` methods; between ``graph_plan`` and the end of the engine no pointer of them changes. ``plan`` and
    ``graph_refresh`` run on the worker's current stream and never wait for the device, except to guard a staging buffer of
    their own (M3).
    """

    graph: ClassVar[GraphSupport] = GraphSupport.NONE
    writes_kv: ClassVar[bool] = False

    @classmethod
    def supports(cls, f: AttnFacts) -> str | None:
        """None if it can serve these facts, else the reason. Cheap, without initializing a device."""
        return None

    @classmethod
    def kv_shape(cls, s: KVSpec, num_pages: int) -> tuple[int, ...]:
        """Shape of one layer's KV pool."""
        return (2, num_pages, s.page_size, s.kv_heads, s.head_dim)

    @abstractmethod
    def __init__(self, ctx: AttnContext) -> None: ...

    @abstractmethod
    def plan(self, b: BatchView) -> Any:
        """Metadata of a step; once per step, not per layer."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, meta: Any, b: BatchView) -> Tensor:
        """Attend to the row's KV, that of this step included.

        Args: q: [n_tokens, heads, head_dim]. k, v: [n_tokens, kv_heads, head_dim], the new ones. kv: this layer's pool, in
        ``kv_shape``. The last dimension is contiguous. Returns: [n_tokens, heads, head_dim].
        """

    def graph_begin(self, rows: Sequence[int]) -> None:
        """Allocate what the captured sizes ``rows`` (of padded rows) need. Called once, before any ``graph_plan``."""
        raise NotImplementedError(f"{type(self).__name__} has graph = NONE")

    def graph_plan(self, b: BatchView) -> Any:
        """Metadata for ``forward`` in the graph of ``b.rows_padded`` rows. ``b``'s device tensors are the graph's own; they
        hold a step of padding rows (one token each, on the dummy page), and its host arrays say so."""
        raise NotImplementedError(f"{type(self).__name__} has graph = NONE")

    def graph_prologue(self, meta: Any, b: BatchView) -> None:
        """Device work recorded at the head of the graph, after ``b``'s tensors are filled: the same for every replay."""

    def graph_refresh(self, meta: Any, b: BatchView) -> None:
        """Host work before a replay. ``b``: the host arrays of the real rows, ``b.n_rows <= b.rows_padded``; its device
        tensors are filled only by the replay."""

    def close(self) -> None:
        """Free what was allocated."""
