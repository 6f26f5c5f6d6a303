"""Ops: the small kernels under the layers. The first plugin of the configured list that has an op provides it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.base.component import Component
from minisgl.runtime.batch import OpTable


@dataclass(frozen=True, slots=True)
class OpsContext:
    settings: Any
    device: torch.device
    dtype: torch.dtype


class Ops(Component):
    """Names and signatures of the ops (``x`` [n, hidden], all return new tensors unless said otherwise):

    ``rms_norm(x, weight, eps)``, also of the heads of ``x`` [n, heads, head_dim], whose tokens may lie apart; ``add_rms_norm(x, residual, weight, eps) -> (normed, residual)``, may write in place;
    ``rope(q, k, pos, cos_sin)`` rotates q [n, heads, head_dim] and k [n, kv_heads, head_dim] (half-split layout) with
    ``cos_sin`` [max_len, rotary_dim] (cosines, then sines), ``pos`` [n] int64, returns (q, k), may write in place;
    ``silu_mul(x)`` [n, 2 * m] -> [n, m];
    ``moe(x, logits, gate_up, down, top_k, renormalize)`` -> [n, hidden], a mixture of experts: ``logits`` [n, experts] of the
    router, ``gate_up`` [experts, 2 * m, hidden] (gate rows, then up rows), ``down`` [experts, hidden, m]. A token's weights are
    the ``top_k`` largest of the softmax over all experts, in float32, divided by their sum if ``renormalize``; an expert is
    ``silu_mul`` between its two products.
    """

    def __init__(self, ctx: OpsContext) -> None:
        self.settings = ctx.settings

    @abstractmethod
    def table(self) -> OpTable:
        """The ops this plugin has on this device."""


def op_table(plugins: list[Ops]) -> OpTable:
    """Merge: for each op, the first plugin that has it."""
    table: OpTable = {}
    for p in plugins:
        for name, fn in p.table().items():
            table.setdefault(name, fn)
    return table
