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
    ``cos_sin`` [max_len, rotary_dim] (cosines, then sines), ``pos`` [n] int64, returns (q, k), may write in place, and may keep
    what it derives from ``pos`` while the same object comes again: every layer of a step has it, and no other step or graph;
    ``store_kv(k, v, kv, loc)`` writes k and v [n, kv_heads, head_dim] to the places ``loc`` [n] int64 of a layer's pool ``kv``
    [2, pages, page_size, kv_heads, head_dim]; a place may come more than once on the dummy page, whose content does not matter;
    ``silu_mul(x)`` [n, 2 * m] -> [n, m];
    ``moe(x, logits, gate_up, down, top_k, renormalize)`` -> [n, hidden], a mixture of experts: ``logits`` [n, experts] of the
    router, ``gate_up`` [experts, 2 * m, hidden] (gate rows, then up rows), ``down`` [experts, hidden, m]. A token's weights are
    the ``top_k`` largest of the softmax over all experts, in float32, divided by their sum if ``renormalize``; an expert is
    ``silu_mul`` between its two products. It is not called for experts that are quantized, or packed for a CPU.

    Ops that a table may have in place of several of the above, used where they are:
    ``qk_norm_rope_store(q, k, v, q_weight, k_weight, eps, pos, cos_sin, kv, loc)`` -> q: norms the heads of q and k (not if
    the weights are None), rotates both and stores k and v; q, k, v are views of one tensor as ``nn.layers.QKVLinear`` gives
    them; may write in place, and leaves in k what it stored;
    ``decode_rows(n, order, kv_len, next_token, page_table, page_size, slot, kv, pos, loc, tokens)`` fills the last five, all
    [rows] int64, from the state of the rows (``runtime.graph.decode_rows`` says what and is the reference).
    """

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if ``auto`` may pick it here, else the reason: what is not installed, or another device. Loads nothing heavy."""
        return None

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
