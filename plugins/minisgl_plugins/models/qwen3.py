"""Qwen 3: the heads of q and k are normed, and their size is not hidden / heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.api import ModelFacts
from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention

DEFAULTS = {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28}  # of a config that has no such keys


class Qwen3ForCausalLM(DecoderLM):
    """With ``use_sliding_window`` the layers from ``max_window_layers`` on have a window."""

    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        return ModelFacts.from_hf({**DEFAULTS, **config}, generation, windows=True)

    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        bias = ctx.facts.attention_bias
        attention = SelfAttention(ctx, i, qkv_bias=bias, out_bias=bias, head_norm=True)
        return DecoderLayer(ctx, attention, GatedMLP(ctx))
