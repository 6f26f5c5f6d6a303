"""The attention backend: reads and writes the paged KV cache."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

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
    page_table: Tensor  # [max_slots + 1, pages_per_row] int32
    settings: Any


class AttentionBackend(Component):
    """Rows of a step may decode (one token) or prefill (several), mixed; a row attends to its KV causally."""

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
        """Store the new K and V, then attend.

        Args: q: [n_tokens, heads, head_dim]. k, v: [n_tokens, kv_heads, head_dim]. kv: this layer's pool, in ``kv_shape``.
        Returns: [n_tokens, heads, head_dim].
        """

    def close(self) -> None:
        """Free what was allocated."""
